"""Profile a command's time and memory (docs/profiling.md)."""
