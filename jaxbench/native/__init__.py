"""Native kernels: products of packed weights and whole decode blocks in C, for CPUs.

`src/` holds the C, `build.py` compiles it to a shared library on first use, `library.py` calls it through ctypes,
`calls.py` through XLA's FFI, torch_ref/native/calls.py through torch.library.
"""
