"""Baselines that the compressor is measured against."""
