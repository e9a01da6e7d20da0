"""The arms of the comparison."""
