"""Performance over time: is a commit slower than another, and why (docs/performance_history.md)."""
