"""The context compressor in PyTorch."""
