"""Where the time and the memory of a command go (docs/profiling.md)."""
