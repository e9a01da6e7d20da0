"""Attacks on marked text."""
