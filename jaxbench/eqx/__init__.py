"""The decoder in Equinox: the third arm of the comparison, independent of the Flax files."""
