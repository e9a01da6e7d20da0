"""Runs the commands on bad input inside this process, one after another, as a shell would call them.

A case is (words, wanted): the command line without `python experiments/`, and what the one line of the error must hold.
{tmp} stands for the case's empty folder, which is the working folder too (configs/ is there); FILES names files that a
case finds in it. A case passes when the command ends with exit code 2, one line on standard error, and nothing written.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from absl import flags

from jaxbench import process_environment
from tests.structure import ROOT

CPU_SECONDS = 5.0  # of this process: what a refusal may take, whatever else the machine does


class Case(NamedTuple):
    """One bad command line."""

    words: str | tuple[str, ...]  # a text is split at spaces
    wanted: tuple[str, ...]  # each stands in the error
    files: dict[str, str | bytes] = {}  # name in {tmp}: content, there before the command starts


def case_of(script: tuple[str, ...], words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case of a command; `|` parts its words, underscores in the names of files stand for dots."""
    given = {name.replace("_", "."): content for name, content in files.items()}
    return Case((*script, *(word for word in words.split("|") if word)), wanted, given)


class Refusal(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str
    cpu_seconds: float
    written: tuple[str, ...]  # paths that appeared, vanished or changed


def words_of(case: Case) -> list[str]:
    """Return the words of a case's command line, script first."""
    return case.words.split() if isinstance(case.words, str) else list(case.words)


def arguments(case: Case, folder: Path) -> list[str]:
    """Return the command line of a case, script first."""
    return [word.replace("{tmp}", str(folder)) for word in words_of(case)]


def prepare(case: Case, folder: Path) -> None:
    """Put what a case needs into its folder."""
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o600)  # key files that others may read are refused


def listing(folder: Path) -> set[tuple[str, int, int]]:
    """Return name, size and time of change of everything under a folder."""
    return {(str(p.relative_to(folder)), p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


def call(case: Case, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Run a case's command in this process."""
    prepare(case, folder)
    script, *words = arguments(case, folder)
    for name, value in process_environment.environment("cpu").items():
        monkeypatch.setenv(name, value)  # or the command would start this process anew
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "experiments" / script), *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, started = listing(folder), time.process_time()
    with one_main(), pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    shown = capsys.readouterr()
    changed = {name for name, *_ in before ^ listing(folder)}
    return Refusal(ended.value.code, shown.out, shown.err, time.process_time() - started, tuple(sorted(changed)))


@contextlib.contextmanager
def one_main() -> Iterator[None]:
    """Undo what a main leaves in its process, or the next one meets it."""
    known, variables, handlers = set(flags.FLAGS), dict(os.environ), _signal_handlers()
    try:
        yield
    finally:
        _restore(known, variables, handlers)


def _signal_handlers() -> dict:
    import signal

    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _restore(known: set[str], variables: dict[str, str], handlers: dict) -> None:
    """Put back flags, variables and signal handlers."""
    import signal

    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    os.environ.clear()
    os.environ.update(variables)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def check(refusal: Refusal, case: Case) -> None:
    """Assert that a refusal is one."""
    lines = refusal.err.strip().splitlines()
    assert refusal.code == 2, refusal
    assert len(lines) == 1 and lines[0].startswith("error: "), refusal.err
    assert [word for word in case.wanted if word not in lines[0]] == [], lines[0]
    assert refusal.written == (), refusal.written
    assert refusal.cpu_seconds < CPU_SECONDS, refusal.cpu_seconds


def name(case: Case) -> str:
    """Return a short id for pytest."""
    words = case.words if isinstance(case.words, str) else " ".join(case.words)
    return words.replace("{tmp}/", "")[:90]


def cases(*modules: object) -> Iterator[Case]:
    """Yield the cases of several modules."""
    for module in modules:
        yield from module.CASES
