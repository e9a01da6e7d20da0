"""Performance over time: whether a commit is slower than another, and why (docs/performance_history.md)."""
