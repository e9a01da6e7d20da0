"""Copy a history to and from another host by rsync over SSH (S file).

A target has rsync's form, [USER@]HOST:FOLDER. Nothing is removed on either side; what a copy replaces on the target is
kept as FILE.before. SSH never prompts: a key with a passphrase must be in the agent, so that a scheduled copy fails
instead of waiting.
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
    """rsync failed; str() gives its error in one line."""


def is_remote(target: str) -> bool:
    """True if a target names a host: it has a colon before any slash, and no folder has this name.

    Raises:
      ValueError: it names a host in a form that rsync over SSH does not accept.
    """
    if ":" not in target.partition("/")[0] or Path(target).exists():
        return False
    if not TARGET.fullmatch(target):
        raise ValueError(f"--backup={target}: wanted a folder, or [USER@]HOST:FOLDER without spaces; ./ before a colon")
    return True


def send(folder: Path, target: str, *, left_out: Sequence[str] = ()) -> int:
    """Copy what a target lacks of a history, or has in another version; return the number of files.

    Args:
      folder: the history's folder.
      target: a folder on a host, in the form that `is_remote` recognises, or a local folder.
      left_out: files that are not copied, by path relative to the folder.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: rsync failed.
    """
    _needed(target)
    given = [f"{folder}/./{name}" for name in KEPT if (folder / name).exists()]
    if not given:
        return 0
    excluded = [f"--exclude=/{name}" for name in left_out]
    how = ["--relative", "--checksum", "--backup", "--suffix=.before", *excluded, *ONLY_KEPT]
    return _rsync([*how, "--", *given, f"{target}/"], target)


def fetch(target: str, folder: Path) -> int:
    """Copy the history of a target into a folder; return the number of files.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: rsync failed.
    """
    return _rsync([*ONLY_KEPT, "--", f"{target}/", f"{folder}/"], target)


def _needed(target: str) -> str:
    """Return the path of rsync."""
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
