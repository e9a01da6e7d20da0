"""Measure long-term memory.

    memory.py arms                    what a memory buys: decoders with and without it on tasks that need one

Bad input ends with exit code 2 and one line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, launch

VALUES = flags.FLAGS


def define_arms() -> None:
    """Define the flags of arms."""
    cli.define_config("configs/memory/arms.yaml")
    cli.define_workdir("out/memory-arms")
    flags.DEFINE_string("part", None, "k/n: only every n-th run from the k-th on, k from 0; no report")


def arms() -> int:
    """Train every arm on every task, and print accuracy by distance."""
    launch.ensure("cpu")
    from jaxbench.memory import arm_report, arm_runs
    from jaxbench.memory import arms as part

    settings, workdir = cli.load_config(part.Arms), Path(VALUES.workdir)
    if VALUES.part is not None:
        arm_runs.run_all(settings, workdir, part=_part(VALUES.part))
        return cli.EXIT_OK
    arm_runs.run_all(settings, workdir)
    show(arm_report.write(settings, part.known(settings, workdir), workdir))
    print(f"written: {workdir}/report.html, results.csv, summary.json")
    return cli.EXIT_OK


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"--part={text} is not k/n with 0 <= k < n")
    return int(found[1]), int(found[2])


def show(tables: list) -> None:
    """Print rich renderables, wide enough where the output is no terminal."""
    from rich.console import Console

    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=150)
    for table in tables:
        screen.print(table)


COMMANDS = {"arms": cli.Command(define_arms, arms, "what a memory buys, on tasks that need one")}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
