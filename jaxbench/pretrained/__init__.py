"""Pretrained models: sources, parameter names, tokenizers."""
