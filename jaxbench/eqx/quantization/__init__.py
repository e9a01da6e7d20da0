"""Quantised decoders in Equinox."""
