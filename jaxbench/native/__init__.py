"""Native kernels: products of packed weights and whole decode blocks in C, for CPUs.

`src/` holds the C, `build.py` makes a shared library of it on first use, `library.py` calls it through ctypes,
`calls.py` through XLA's FFI, torch_ref/native/calls.py through torch.library.
"""
