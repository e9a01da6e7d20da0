"""Turn a commit into a folder that can be run: a worktree with the packages that it pins (S file).

The folder and its packages are made once and kept for the next run. If the commit pins the same versions as this one,
it uses the packages of this interpreter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import process_environment, store
from jaxbench.measure import environment, process

ROOT = Path(__file__).resolve().parents[2]
PINS = ("pyproject.toml", "constraints.txt")
BUILD_S = 1800.0  # time limit for installing packages
ANSWER_S = 60.0  # time limit for a version to report the variables that it sets
VARIABLES = """import json, sys
from jaxbench.measure import process
print(json.dumps(process.environment(sys.argv[1], threads=int(sys.argv[2]))))"""


class Tree(NamedTuple):
    """A runnable version of the code."""

    root: Path
    python: Path
    commit: str  # short; with + and a hash where the folder differs from it
    subject: str  # first line of the commit's message

    def environment(self, device: str, threads: int) -> dict[str, str]:
        """Return the environment of a process that imports it: the user's, and what this version's commands set.

        A version that cannot report them (`reported`) gets those of the running version.
        """
        found = self.reported(device, threads) or here().reported(device, threads)
        return (found or process.environment(device, threads=threads)) | self._paths()

    def reported(self, device: str, threads: int) -> dict[str, str] | None:
        """Return the environment that this version's commands set, asked of its own code.

        None if it cannot report them, such as one older than `measure.process` or one that does not start.
        """
        own = process_environment.inherited() | self._paths()
        command = [str(self.python), "-c", VARIABLES, device, str(threads)]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=own, capture_output=True, text=True, timeout=ANSWER_S, check=True
            )
            return json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None

    def _paths(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}


class NotBuilt(RuntimeError):
    """A commit cannot be run here; str() says why in one line."""


def here() -> Tree:
    """Return the running code, including uncommitted changes."""
    return Tree(ROOT, Path(sys.executable), environment.commit(), _subject("HEAD"))


def of_commit(name: str, folder: Path, *, say: Callable[[str], Any] = lambda text: None) -> Tree:
    """Return the tree of a commit, branch or tag; create it under `folder` if it does not exist.

    If another run is creating it, wait for that.

    Raises:
      ValueError: git knows no such commit.
      NotBuilt: its worktree cannot be created or its packages cannot be installed.
    """
    sha = resolved(name)
    root = (folder / sha[:12]).absolute()
    with store.locked(root):
        if not (root / "pyproject.toml").is_file():
            say(f"worktree of {sha[:12]}")
            try:
                _check_out(sha, root)
            except subprocess.CalledProcessError as error:
                raise NotBuilt(f"{name}: no worktree of {sha[:12]} ({process.last_line(error.stderr)})") from error
        return Tree(root, _python(root, name, say), sha[:12], _subject(sha))


def _check_out(sha: str, root: Path) -> None:
    """Create a worktree, whole or not at all: under another name, which is changed at the end."""
    partial = root.with_name(f"{root.name}.partial")
    for remains in (root, partial):  # of a run that was killed
        shutil.rmtree(remains, ignore_errors=True)
    _git("worktree", "prune")
    _git("worktree", "add", "--detach", "--force", str(partial), sha)
    _git("worktree", "move", str(partial), str(root))


def remove(tree: Tree) -> None:
    """Remove a worktree that of_commit made."""
    _git("worktree", "remove", "--force", str(tree.root))


def resolved(name: str) -> str:
    """Return the SHA of a commit.

    Raises:
      ValueError: git knows no commit of this name.
    """
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"--compare_with={name}: git knows no such commit, branch or tag in {ROOT.name}, and no run has this name"
        ) from error


def _python(root: Path, name: str, say: Callable[[str], Any]) -> Path:
    """Return an interpreter that has the packages that a tree pins."""
    if _pins(root) == _pins(ROOT):
        return Path(sys.executable)
    script, venv = root / ".ci" / "environment", root / ".venv"
    if not script.is_file():
        raise NotBuilt(f"{name}: {root.name} pins other packages and has no .ci/environment to install them")
    say(f"packages of {root.name}, which pins others than this commit")
    command = [str(script), str(venv), sys.executable]
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_VENV", "PYTHONPATH")}
    try:
        subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=BUILD_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{name}: its packages took longer than {BUILD_S:.0f} s to install") from error
    except (OSError, subprocess.CalledProcessError) as error:
        said = process.last_line(getattr(error, "stderr", ""))
        raise NotBuilt(f"{name}: its packages cannot be installed ({said})") from error
    return venv / "bin" / "python"


def _pins(root: Path) -> str:
    parts = [(root / name).read_bytes() if (root / name).is_file() else b"" for name in PINS]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


def _subject(name: str) -> str:
    try:
        return _git("log", "-1", "--format=%s", name).strip()
    except (OSError, subprocess.SubprocessError):
        return ""  # a copy that is no git repository, or git is missing


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
