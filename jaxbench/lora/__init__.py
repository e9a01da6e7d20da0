"""Low-rank adapters: a few parameters beside frozen projections."""
