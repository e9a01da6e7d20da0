"""The native kernels under PyTorch: the same C through torch.library."""
