"""Parity engine: prove that backends compute the same function, or name the module where they differ."""
