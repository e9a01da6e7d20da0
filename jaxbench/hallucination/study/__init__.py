"""How well detectors do on responses that they were not fitted to."""
