"""The PyTorch twins of jaxbench/lora/."""
