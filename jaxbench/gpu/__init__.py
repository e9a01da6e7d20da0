"""GPU measurements: stages in order of priority, packed to carry, rehearsed and compiled ahead without a GPU."""
