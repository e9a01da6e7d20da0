"""Output that is no terminal is never wrapped; on a terminal it is laid out in the terminal's width."""

from __future__ import annotations

import sys

import pytest
from rich.table import Table
from rich.text import Text

from jaxbench import terminal
from tests.structure import PACKAGES, relative, sources

LONG_PATH = "/a/folder/" + "with a rather long name/" * 30 + "scores.jsonl"


def table() -> Table:
    found = Table()
    found.add_column("file")
    found.add_row(LONG_PATH)
    return found


@pytest.mark.parametrize("columns", ["1", "20", "80", None])
def test_a_line_for_a_file_is_as_long_as_its_content(monkeypatch, capsys, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich calls it a terminal then
    terminal.console().print(f"written: {LONG_PATH}, and 12 more")
    terminal.console(stderr=True).print(LONG_PATH * 20)
    terminal.console().print(table())
    shown = [Text.from_ansi(text).plain for text in capsys.readouterr()]
    assert shown[0].splitlines()[0] == f"written: {LONG_PATH}, and 12 more"
    assert shown[1].splitlines() == [LONG_PATH * 20]
    assert len(shown[0].splitlines()) == 1 + 5 and f" {LONG_PATH} " in shown[0]


def test_a_terminal_wraps_in_its_own_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.console().print(table())
    lines = capsys.readouterr().out.splitlines()
    assert max(len(Text.from_ansi(line)) for line in lines) == 40 and len(lines) > 5


def test_a_quiet_console_prints_nothing(capsys):
    terminal.console(stderr=True, quiet=True).print("a line")
    assert capsys.readouterr() == ("", "")


def test_no_file_makes_a_console_of_its_own():
    own = {relative(path) for path in sources(*PACKAGES, "experiments") if "Console()" in path.read_text()}
    assert own == set()
