"""jaxbench: LLM research systems in JAX/Flax, proven equal to a PyTorch reference and compared with it."""
