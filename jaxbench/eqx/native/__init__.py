"""The native kernels in Equinox."""
