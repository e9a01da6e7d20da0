"""How each scheme marks logits and computes the words of a text, in PyTorch; one file per scheme."""
