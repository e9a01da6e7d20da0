"""A training run: configuration, optimiser step, checkpoints, what it shows."""
