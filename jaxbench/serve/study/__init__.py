"""Studies of serving: what it costs, and what load and faults it withstands."""
