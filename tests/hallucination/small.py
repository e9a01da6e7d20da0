"""A small folder of RAGTruth's format, written here, and a random reader for it."""

from __future__ import annotations

import json
from pathlib import Path

from jaxbench.hallucination import extract, ragtruth, reader_settings
from tests.generation import tiny

CONTEXTS = {
    "s1": ("QA", "when was the mill built", "The old mill was built in 1820 by Jonas Reed. It burned in 1911."),
    "s2": ("Summary", None, "Rain fell over Lisbon on Monday. Two roads were closed until noon."),
}
RESPONSES = [
    ("r1", "s1", "one", "It was built in 1820.", []),
    ("r2", "s1", "two", "It was built in 1850 by Jonas Reed.", [(16, 20)]),
    ("r3", "s1", "one", "Jonas Reed built it; it burned.", []),
    ("r4", "s2", "two", "Snow closed two roads.", [(0, 4)]),
]


def write(folder: Path) -> Path:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [{"source_id": k, "task": t, "question": q, "context": c} for k, (t, q, c) in CONTEXTS.items()]
    rows = [
        {"id": i, "source_id": s, "model": m, "response": r,
         "labels": [{"start": a, "end": b, "label_type": "Evident Conflict"} for a, b in spans]}
        for i, s, m, r, spans in RESPONSES
    ]  # fmt: skip
    for name, lines in (("sources.jsonl", sources), ("responses.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def items(folder: Path) -> list[extract.Item]:
    """Return what is read of the folder."""
    data = ragtruth.load(folder)
    return [extract.Item(data.source(r).context, data.source(r).asked, r.response) for r in data.responses]


def settings(model: Path, **changes: object) -> reader_settings.ReaderSettings:
    """Return settings of a reader in float32."""
    return reader_settings.ReaderSettings(**({"model": str(model), "dtype": "float32", "lens_tokens": 3} | changes))


def model(folder: Path) -> Path:
    """Write the random model, whose tokens are bytes."""
    return tiny.make(folder)
