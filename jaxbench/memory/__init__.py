"""Long-term memory: Titans' neural memory."""
