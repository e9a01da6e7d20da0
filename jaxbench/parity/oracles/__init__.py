"""Oracles for what all backends share, which no comparison between them can show: answers that no code here wrote."""
