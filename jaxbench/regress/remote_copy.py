"""A history copied to and from another host by rsync over SSH (S file).

A target is written as rsync writes it, [USER@]HOST:FOLDER. Nothing is removed on either side, what a copy replaces
there is kept beside it as FILE.before, and SSH asks for nothing: a key that wants a passphrase is the agent's, so that
a schedule's copy ends instead of waiting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jaxbench.regress import history

TIMEOUT_S = 3600.0  # of one copy
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20"
TARGET = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.-]*:(?!:|//)[^\s'\"]+")
KEPT = (history.RUNS, history.QUALIFIED, history.EVENTS)  # of a history's folder
ONLY_KEPT = (
    "--include=*/", "--include=*.json", f"--include=/{history.EVENTS}", "--exclude=*", "--prune-empty-dirs",
)  # fmt: skip


class CopyFailed(RuntimeError):
    """rsync ended with an error; str() says which in one line."""


def is_remote(target: str) -> bool:
    """True where a target names a host: a colon before any slash, and no folder of this name.

    Raises:
      ValueError: it names one in a way that rsync over SSH does not take.
    """
    if ":" not in target.partition("/")[0] or Path(target).exists():
        return False
    if not TARGET.fullmatch(target):
        raise ValueError(f"--backup={target}: wanted a folder, or [USER@]HOST:FOLDER without spaces; ./ before a colon")
    return True


def send(folder: Path, target: str, *, left_out: Sequence[str] = ()) -> int:
    """Copy what a target lacks of a history, or has in another version; how many files.

    Args:
      folder: of the history.
      target: a host's folder, as `is_remote` knows it, or a folder here.
      left_out: files that are not copied, by their paths from the folder.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: it failed.
    """
    _needed(target)
    given = [f"{folder}/./{name}" for name in KEPT if (folder / name).exists()]
    if not given:
        return 0
    excluded = [f"--exclude=/{name}" for name in left_out]
    how = ["--relative", "--checksum", "--backup", "--suffix=.before", *excluded, *ONLY_KEPT]
    return _rsync([*how, "--", *given, f"{target}/"], target)


def fetch(target: str, folder: Path) -> int:
    """Copy the history of a target into a folder; how many files.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: it failed.
    """
    return _rsync([*ONLY_KEPT, "--", f"{target}/", f"{folder}/"], target)


def _needed(target: str) -> str:
    """Path of rsync."""
    if (path := shutil.which("rsync")) is None:
        raise ValueError(
            f"--backup={target} names a host, and rsync is not installed here; install it, or copy to a folder"
        )
    return path


def _rsync(arguments: list[str], target: str) -> int:
    command = [_needed(target), "--archive", "--no-links", "--out-format=%n", f"--rsh={SSH}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CopyFailed(f"--backup={target}: rsync took longer than {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise CopyFailed(
            f"--backup={target}: rsync ended with {done.returncode} ({lines[0] if lines else 'no message'})"
        )
    return sum(name.endswith((".json", ".jsonl")) for name in done.stdout.splitlines())
