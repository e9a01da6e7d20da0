"""Test what `ask` finds: a sentence with a number or a name, inserted into a long text at a depth, is asked for.

A text is read in blocks whatever its length, so depth should not matter. The control, the same decoder over the same
blocks as plain text, shows what does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import store, terminal
from jaxbench.compress import answer_run, answering, ask, evaluate, questions
from jaxbench.compress.auto import AutoCompressor, Prompt
from jaxbench.text import answers

DEPTHS = (0.05, 0.5, 0.95)  # of the sentence, as a share of the text
FIRST, LAST = ("Harriet", "Walter", "Agnes", "Silas", "Edith"), ("Vance", "Holloway", "Marsh", "Pryor", "Whitlock")
KINDS = {
    "number": ("The number of the old lighthouse is {}.", "What is the number of the old lighthouse?"),
    "name": ("The keeper of the old lighthouse is {}.", "Who is the keeper of the old lighthouse?"),
}
Progress = Callable[[int], Any]


class Needle(NamedTuple):
    """A text with an inserted sentence."""

    kind: str
    depth: float
    document: int
    ids: np.ndarray
    question: np.ndarray
    answer: str


def needles(texts: Sequence[np.ndarray], tokenizer: Any, *, length: int, count: int, seed: int) -> list[Needle]:
    """Make `count` texts of a length for every kind and depth, from the documents in turn.

    Raises:
      ValueError: no document is long enough.
    """
    random, found = np.random.default_rng(seed), []
    fitting = [(i, text) for i, text in enumerate(texts) if len(text) >= length]
    if not fitting:
        raise ValueError(f"needles: the longest text has {max(map(len, texts), default=0)} tokens; wanted {length}")
    stop = tokenizer.encode("A.", add_special=False)[-1]
    for kind, (sentence, question) in KINDS.items():
        for depth in DEPTHS:
            for number in range(count):
                document, text = fitting[number % len(fitting)]
                start = int(random.integers(len(text) - length + 1))
                part = text[start : start + length]
                name = f"{FIRST[random.integers(len(FIRST))]} {LAST[random.integers(len(LAST))]}"
                answer = str(random.integers(10_000, 100_000)) if kind == "number" else name
                needle = np.array(tokenizer.encode(" " + sentence.format(answer), add_special=False), np.int32)
                stops = np.flatnonzero(part == stop) + 1
                place = int(stops[np.argmin(np.abs(stops - depth * length))]) if len(stops) else int(depth * length)
                ids = np.concatenate([part[:place], needle, part[place:]]).astype(np.int32)
                asked = np.array(tokenizer.encode(questions.asked(question), add_special=False), np.int32)
                found.append(Needle(kind, depth, document, ids, asked, answer))
    return found


def run(
    compressor: AutoCompressor, side: answer_run.Side, drawn: Sequence[Needle], ratios: Sequence[int], workdir: Path,
    *, say: Callable[[str], Any] = print,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Compute figures with plain text and by ratio, each saved as a part of workdir."""
    rows = {}
    for ratio in (1, *ratios):
        name = "clear" if ratio == 1 else f"vectors-{ratio}"

        own = compressor if ratio == 1 else compressor.with_ratio(ratio)

        def compute(own: AutoCompressor = own, name: str = name) -> list[float]:
            with terminal.progress(len(drawn)) as advance:
                return found(own, side, drawn, in_clear=name == "clear", progress=advance)

        hits, was_there = store.kept(workdir / f"{name}.json", compute)
        rows[name] = figures(drawn, hits)
        shown = ", ".join(f"{row['kind']} at {row['depth']:.0%} {row['found'][0]:.0%}" for row in rows[name])
        say(f"{name}: {shown}" + (" (finished before)" if was_there else ""))
    return rows


def found(
    compressor: AutoCompressor, side: answer_run.Side, drawn: Sequence[Needle], *, in_clear: bool = False,
    progress: Progress = lambda count: None,
) -> list[float]:  # fmt: skip
    """Return 1.0 for every needle whose answer is given, else 0.0.

    Args:
      side: the decoder that reads.
      in_clear: blocks are read as plain text, not as vectors.
    """
    hits = []
    for needle in drawn:
        best = ask.best_of(*side, compressor.tokenizer, _prompts(compressor, needle, in_clear=in_clear))
        hits.append(answers.exact_match(best.text or "", (needle.answer,)))
        progress(1)
    return hits


def _prompts(compressor: AutoCompressor, needle: Needle, *, in_clear: bool) -> list[Prompt]:
    size = ask.CHUNKS * compressor.config.chunk
    parts = [needle.ids[first : first + size] for first in range(0, len(needle.ids), size)]
    if in_clear:
        return [answering.in_clear(compressor, part, needle.question) for part in parts]
    vectors = [evaluate.tokens_of(compressor, part)[0] for part in parts]
    return [answering.behind(compressor, each, needle.question) for each in vectors]


def figures(drawn: Sequence[Needle], hits: Sequence[float]) -> list[dict[str, Any]]:
    """Share found, by kind and depth, with 95 % intervals over documents."""
    rows = []
    for kind in KINDS:
        for depth in DEPTHS:
            mine = [i for i, each in enumerate(drawn) if (each.kind, each.depth) == (kind, depth)]
            value = evaluate.mean_interval(np.array(hits)[mine], [drawn[i].document for i in mine])
            rows.append({"kind": kind, "depth": depth, "found": value, "asked": len(mine)})
    return rows
