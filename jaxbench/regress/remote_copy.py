"""Runs copied to and from another host by rsync over SSH (S file).

A target is written as rsync writes it, [USER@]HOST:FOLDER. Nothing is removed on either side, and SSH asks for nothing:
a key that wants a passphrase is the agent's, so that a schedule's copy ends instead of waiting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 3600.0  # of one copy
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20"
TARGET = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.-]*:(?!:|//)[^\s'\"]+")
ONLY_RUNS = ("--include=*/", "--include=*.json", "--exclude=*", "--prune-empty-dirs")


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


def send(runs: Path, target: str) -> int:
    """Copy runs that a target lacks, or has in another version; how many.

    Args:
      runs: the folder `runs` of a history.
      target: a host's folder, as `is_remote` knows it, or a folder here.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: it failed.
    """
    _needed(target)
    if not runs.is_dir():
        return 0
    return _rsync(["--relative", "--checksum", *ONLY_RUNS, "--", f"{runs.parent}/./{runs.name}/", f"{target}/"], target)


def fetch(target: str, folder: Path) -> int:
    """Copy the runs of a target into a folder; how many.

    Raises:
      ValueError: rsync is not installed.
      CopyFailed: it failed.
    """
    return _rsync([*ONLY_RUNS, "--", f"{target}/", f"{folder}/"], target)


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
    return sum(name.endswith(".json") for name in done.stdout.splitlines())
