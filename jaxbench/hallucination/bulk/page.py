"""Write verdicts as one HTML page that opens offline, from the template page.html, row by row (S file).

Everything from a row is escaped, and the page may load no resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from jaxbench import outputs

TEMPLATE = Path(__file__).with_name("page.html")


class About(NamedTuple):
    """The header of a page."""

    name: str  # of the input
    total: int  # responses
    flagged: int  # of them
    threshold: float  # probability from which a response counts as hallucinated
    part_threshold: float  # and from which a sentence does


class Piece(NamedTuple):
    """A piece of a response."""

    text: str
    probability: float | None  # of the span that it lies in; None = of no span


def write(path: Path, pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], about: About) -> None:
    """Write the page of rows and their verdicts, atomically; at most one row is held in memory."""
    pages = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )  # fmt: skip
    template = pages.from_string(TEMPLATE.read_text(encoding="utf-8"))
    rows = (
        {"number": number, "row": row, "verdict": verdict, "parts": parts(row["response"], verdict)}
        for number, (row, verdict) in enumerate(pairs, 1)
    )
    with outputs.whole(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(template.generate(about._asdict() | {"rows": rows}))


def parts(response: str, verdict: Mapping[str, Any]) -> Iterator[tuple[list[Piece], Mapping[str, Any] | None]]:
    """Yield a response in parts that together cover it: each sentence, and the text between sentences."""
    end = 0
    for sentence in verdict["sentences"]:
        if between := response[end : sentence["start"]]:
            yield [Piece(between, None)], None
        end = sentence["end"]
        yield pieces(response, sentence["start"], end, verdict["spans"]), sentence
    if end < len(response):
        yield [Piece(response[end:], None)], None


def pieces(response: str, start: int, end: int, spans: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Cut characters `start` to `end` of a response where a span begins or ends."""
    found = []
    for span in spans:
        first, last = max(start, span["start"]), min(end, span["end"])
        if first < last:
            if start < first:
                found.append(Piece(response[start:first], None))
            found.append(Piece(response[first:last], span["probability"]))
            start = last
    if start < end:
        found.append(Piece(response[start:end], None))
    return found
