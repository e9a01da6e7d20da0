"""Record the time of each kind of stage of an evaluation, and of the whole (S file).

Every computed stage appends its time; a stage kept from an earlier start has its line from then. So an interrupted run
has the same table as an uninterrupted one, except for the stage that was interrupted (and a stage whose process was
killed after writing its file and before its line).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxbench import store

TIMES = "times.jsonl"


def note(workdir: Path, stage: str, seconds: float, texts: int) -> None:
    """Append the time of a stage, and how many texts it worked on (0: not counted)."""
    store.append(workdir / TIMES, [{"stage": stage, "seconds": seconds, "texts": texts}])


def table(workdir: Path) -> list[dict[str, Any]]:
    """Return one row per kind of stage, by first appearance: seconds, texts, texts per second; the last is the whole.

    If a stage has several lines (recomputed after a kill), the last one counts.
    """
    lines = {row["stage"]: row for row in map(json.loads, store.rows(workdir / TIMES))}
    kinds: dict[str, dict[str, Any]] = {}
    for name, row in lines.items():
        own = kinds.setdefault(kind_of(name), {"seconds": 0.0, "texts": 0})
        own["seconds"] += row["seconds"]
        own["texts"] += row["texts"]
    if kinds:
        kinds["end to end"] = {
            "seconds": sum(own["seconds"] for own in kinds.values()), "texts": kinds.get("generate", {}).get("texts", 0)
        }  # fmt: skip
    for own in kinds.values():
        own["texts_per_s"] = own["texts"] / own["seconds"] if own["texts"] and own["seconds"] else None
    return [{"stage": kind, **own} for kind, own in kinds.items()]


def kind_of(stage: str) -> str:
    """Return the kind of a stage: attacks by name, quality by the judging model, all others by folder."""
    folder, *rest = stage.split("/")
    if folder == "attack":
        return f"attack {rest[-1].rpartition('-')[0]}"
    if folder == "quality":
        return "quality, own model" if rest[-1] == "generation" else "quality, judge"
    return folder
