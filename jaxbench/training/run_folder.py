"""The folder of a training run: what a run writes there, whose it is, and folders in it replaced whole (S file)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxbench import config
from jaxbench.training.train_config import TrainConfig

RECORDS, SUMMARY, CONFIG = "records.jsonl", "summary.json", "config.yaml"
CHECKPOINTS, EXPORT, BOARD, PROFILE = "checkpoints", "export", "tensorboard", "profile"
ADAPTERS = "adapters"  # folder with the adapters of a run that trained them, for PEFT
REPLACED = (CONFIG, RECORDS, SUMMARY, EXPORT, ADAPTERS)  # what a run that begins here replaces
MAX_LISTED = 6  # differing settings shown


def saved_config(folder: Path, like: TrainConfig) -> TrainConfig | None:
    """Return the configuration of the run in a folder; None if there is none, or none of this kind."""
    try:
        return config.load(folder / CONFIG, (), type(like))
    except (OSError, ValueError):
        return None


def check_start(folder: Path, settings: TrainConfig, *, backend: str, text_sha256: str) -> None:
    """Check that a run that found no checkpoint in its folder replaces no file but its own, of an earlier start.

    Raises:
      ValueError: files are there that another run or the user wrote.
    """
    if not (there := [name for name in REPLACED if os.path.lexists(folder / name)]):
        return
    before = saved_config(folder, settings)
    if before is None:
        reason = f"no {CONFIG} says that they are this run's"
    else:
        ours = {"config": settings.identity(), "backend": backend, "text_sha256": text_sha256}
        theirs = ours | {"config": before.identity()} | _summarised(folder)
        reason = differences({name: ours[name] for name in theirs}, theirs)
    if reason:
        raise ValueError(
            f"train: {folder} has no checkpoint, and {', '.join(there)} of another run or of yours: {reason}; use "
            "another --workdir, or move them"
        )


def _summarised(folder: Path) -> dict[str, Any]:
    """Backend and text of the finished run in a folder, as far as its summary says them."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or a damaged one
        return {}
    summary = summary if isinstance(summary, dict) else {}
    return {name: summary[name] for name in ("backend", "text_sha256") if name in summary}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """List what differs between the identity of this run and that of the one before it; "" = nothing."""
    is_, was = _flat(ours), _flat(theirs)
    keys = sorted(key for key in is_.keys() | was.keys() if is_.get(key) != was.get(key))
    return ", ".join(f"{key} was {was.get(key)}, is {is_.get(key)}" for key in keys[:MAX_LISTED])


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries into one with dotted keys."""
    if not isinstance(tree, Mapping):
        return {prefix: tree if not isinstance(tree, list | tuple) else list(tree)}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which takes the place of `folder` if the block ends without an error.

    What lies there stays until then. The caller holds the folder above it, as a run does.
    """
    made, before = (folder.with_name(f".{folder.name}.{part}") for part in ("new", "old"))
    for path in (made, before):
        shutil.rmtree(path, ignore_errors=True)  # of a process that was killed in here
    made.mkdir()
    try:
        yield made
        if os.path.lexists(folder):
            os.rename(folder, before)
        os.rename(made, folder)
    finally:
        for path in (made, before):
            shutil.rmtree(path, ignore_errors=True)
