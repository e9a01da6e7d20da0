"""Benchmarks, calibration, power and evaluation of the watermarks."""
