"""Detection in files larger than memory."""
