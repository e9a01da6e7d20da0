"""Training over several devices and processes."""
