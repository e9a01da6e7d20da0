"""Long-term memory: Titans' neural memory, and a bank of compressed states."""
