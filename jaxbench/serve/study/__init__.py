"""What serving costs, and what it withstands."""
