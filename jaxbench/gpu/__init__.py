"""What waits for a GPU: stages in order of worth, packed, rehearsed without one, and read before there is one."""
