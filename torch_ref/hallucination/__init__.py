"""The hallucination lab's reader in PyTorch."""
