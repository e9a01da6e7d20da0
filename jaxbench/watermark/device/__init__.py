"""How each scheme marks logits and computes the words of a text, in JAX; one file per scheme. Twin: torch_ref."""
