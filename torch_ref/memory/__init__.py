"""The PyTorch twins of jaxbench/memory/."""
