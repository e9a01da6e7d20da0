"""How long each kind of stage of an evaluation took, from end to end (S file).

Every stage that is computed appends its time; one that is kept from an earlier start has its line of then. So a run
that was interrupted has the same table as one that was not, up to the stage that was cut off
(and one whose process was killed between its file and its line).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxbench import store

TIMES = "times.jsonl"


def note(workdir: Path, stage: str, seconds: float, texts: int) -> None:
    """Append the time of a stage, and how many texts it worked on (0: none of its own)."""
    store.append(workdir / TIMES, [{"stage": stage, "seconds": seconds, "texts": texts}])


def table(workdir: Path) -> list[dict[str, Any]]:
    """A row a kind of stage, in the order of their first: seconds, texts, texts a second; the last one is the whole.

    Of a stage with several lines (computed again after a kill) the last one counts.
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
    """Kind of a stage: attacks by their name, quality by the model that judges, all others by their folder."""
    folder, *rest = stage.split("/")
    if folder == "attack":
        return f"attack {rest[-1].rpartition('-')[0]}"
    if folder == "quality":
        return "quality, own model" if rest[-1] == "generation" else "quality, judge"
    return folder
