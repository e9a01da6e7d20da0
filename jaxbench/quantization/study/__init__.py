"""What quantisation costs: every method on one model, one table."""
