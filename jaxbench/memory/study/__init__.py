"""What the memories are measured with."""
