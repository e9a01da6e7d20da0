"""Pretrained models: where they come from, how they are named, their tokenizers."""
