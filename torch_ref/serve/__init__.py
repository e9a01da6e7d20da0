"""Serving's runners in PyTorch."""
