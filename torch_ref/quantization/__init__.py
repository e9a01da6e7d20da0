"""Quantisation in PyTorch."""
