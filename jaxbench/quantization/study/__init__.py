"""The quality cost of quantisation: every method on one model, in one table."""
