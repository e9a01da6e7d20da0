"""Evaluate detectors on responses that they were not fitted to."""
