"""Settings of the frameworks for NVIDIA, AMD, Apple, Intel and TPU: effect, source and measurements of each.

    presets.py list
    presets.py show --name=nvidia
    eval "$(python experiments/presets.py export --name=nvidia)"
    presets.py check --name=nvidia

A preset becomes environment variables for any command to run under; variables that are already set win.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, terminal

VALUES = flags.FLAGS


def _define_named() -> None:
    flags.DEFINE_string("name", None, "a preset's name, or a YAML file", required=True)


def list_() -> int:
    """List the presets."""
    import rich.table

    from jaxbench import presets

    table = rich.table.Table("name", "device", "settings", "measured here", "about")
    for name in presets.names():
        found = presets.load(name)
        measured = sum(bool(setting.measured) for setting in found.settings)
        table.add_row(name, found.device, str(len(found.settings)), str(measured), found.about)
    terminal.console().print(table)
    return cli.EXIT_OK


def show() -> int:
    """Show every setting of a preset with its source."""
    from jaxbench import presets

    found = presets.load(VALUES.name)
    print(f"{VALUES.name}: {found.about}")
    for each in found.settings:
        only = "" if each.is_default else ", with --all"
        dashes = "--" if each.kind in presets.FLAGS else ""
        value = f" = {each.value}" if each.value else ""
        print(f"\n{dashes}{each.name}{value}    ({each.kind}, {each.framework}{only})")
        print(f"  {each.about}\n  source: {each.source}\n  measured here: {each.measured or 'no'}")
    return cli.EXIT_OK


def define_export() -> None:
    """Define the flags of export."""
    _define_named()
    flags.DEFINE_bool("all", False, "also what is for some programs alone")


def export() -> int:
    """Print lines for a shell; lines of Python, which cannot be exported, go to stderr."""
    from jaxbench import presets

    found = presets.load(VALUES.name)
    print(presets.exported(presets.variables(found, everything=VALUES.all)), end="")
    for each in found.settings:
        if each.kind == "python" and (each.is_default or VALUES.all):
            print(f"in the program: {each.name}({each.value})", file=sys.stderr)
    return cli.EXIT_OK


def check() -> int:
    """Report the XLA flags of a preset that the installed JAX does not know: exit code 1 if there are any."""
    from jaxbench import presets

    found = presets.load(VALUES.name)
    unknown = presets.unknown_flags(found)
    if unknown:
        raise cli.GateFailed(f"preset {VALUES.name}: this jaxlib does not know {', '.join(unknown)}")
    print(f"{VALUES.name}: this jaxlib knows its {sum(each.kind == 'xla' for each in found.settings)} XLA flags")
    return cli.EXIT_OK


COMMANDS = {
    "list": cli.Command(lambda: None, list_, "List the presets."),
    "show": cli.Command(_define_named, show, "Show every setting of a preset with its source."),
    "export": cli.Command(define_export, export, "Print the lines that a shell reads."),
    "check": cli.Command(_define_named, check, "Does the installed JAX know a preset's flags?"),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
