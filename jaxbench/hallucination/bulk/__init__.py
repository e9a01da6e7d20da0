"""Verdicts on files larger than memory."""
