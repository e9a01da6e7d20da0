"""The parity engine: proof that backends compute the same function, and the name of the module where they do not."""
