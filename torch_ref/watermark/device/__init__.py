"""How each scheme marks logits, and reads the words of a text, in PyTorch; one file a scheme."""
