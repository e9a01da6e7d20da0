"""The program `jaxbench`, also as `python -m jaxbench`: commands for models that are not jaxbench's own (S file)."""

from __future__ import annotations

import sys

from jaxbench import cli
from jaxbench.pair import command


def main() -> None:
    """Run the command that the first word names; `jaxbench pair FILE` stands for `jaxbench pair --file=FILE`."""
    argv = list(sys.argv)
    if len(argv) > 2 and argv[1] == "pair" and not argv[2].startswith("-"):
        argv[2] = f"--file={argv[2]}"
    commands = {"pair": cli.Command(command.define_flags, command.main, command.ABOUT)}
    cli.run_commands(commands, about="jaxbench on your own models.", argv=["jaxbench", *argv[1:]])


if __name__ == "__main__":
    main()
