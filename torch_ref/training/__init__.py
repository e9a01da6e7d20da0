"""The training run's step and engine."""
