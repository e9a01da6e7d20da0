"""Oracles for code that all backends share, whose bugs no comparison between them shows: answers from other code."""
