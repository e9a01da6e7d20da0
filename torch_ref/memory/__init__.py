"""PyTorch twins of jaxbench/memory."""
