"""The PyTorch twins of jaxbench/watermark/."""
