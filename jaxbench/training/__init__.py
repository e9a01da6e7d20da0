"""A training run: configuration, optimiser step, checkpoints, logging."""
