"""Watermarks in generated text: schemes, detection with exact p-values, attacks, evaluation (S file)."""
