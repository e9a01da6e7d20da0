"""Layers that are measured."""
