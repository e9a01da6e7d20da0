"""How each scheme marks logits, and reads the words of a text, in JAX; one file a scheme. Twin: torch_ref."""
