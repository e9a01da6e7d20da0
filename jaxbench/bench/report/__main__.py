"""Write the report of a finished comparison again: `python -m jaxbench.bench.report --workdir=out/default`."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from jaxbench import cli
from jaxbench.bench.report import report


def main() -> int:
    """Write and print the report of the run in --workdir."""
    workdir = Path(flags.FLAGS.workdir)
    report.write(*report.read_run(workdir), workdir)
    return 0


if __name__ == "__main__":
    cli.define_workdir("out/default")
    cli.run(main, about=__doc__)
