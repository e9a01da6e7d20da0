"""Weights in fewer bits: how they are rounded, and the files they are kept in."""
