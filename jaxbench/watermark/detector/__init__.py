"""The neural detector."""
