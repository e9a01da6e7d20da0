"""Low-rank adapters: a few parameters added to frozen projections."""
