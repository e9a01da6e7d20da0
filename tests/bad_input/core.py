"""Bad input of compare.py, parity.py, parallel.py and train.py: command line, what the error says."""

from __future__ import annotations

from tests.bad_input.harness import Case

CASES = [
    Case("compare.py --set=rounds.launchs=3", ("rounds.launchs", "nearest is rounds.launches")),
    Case("train.py --steps=4", ("--steps", "no flag")),
]
