"""Quantisation and pruning of weights, and the file formats of quantised weights."""
