"""Text to token ids: documents, packed rows, passages."""
