"""Compute how a compressor's decoder answers questions, as figures and a table.

Each arm is saved as a part of --workdir: a killed run resumes with the next arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.table

from jaxbench import sample, store, terminal, transformer
from jaxbench.compress import answering, llmlingua, questions, reading
from jaxbench.compress.auto import AutoCompressor, Prompt
from jaxbench.config import TransformerConfig
from jaxbench.measure import environment
from jaxbench.pretrained import weights

SAID = {
    "untuned": "whole passage, decoder without adapters", "closed": "no passage", "open": "whole passage",
    "keep": "its beginning kept", "llmlingua": "LLMLingua's tokens kept", "others": "another passage's vectors",
    "vectors": "vectors",
}  # fmt: skip


FURTHER = (2, 4)  # multiples of the largest ratio: LLMLingua keeps more than requested, so less is requested too
Shorten = Callable[[Sequence[str], int], list[str]]


class Side(NamedTuple):
    """A decoder in two forms: one scores given tokens, one generates."""

    reader: reading.Reader
    generate: answering.Generate


def side(config: TransformerConfig, params: Mapping[str, np.ndarray], tokenizer: Any, precision: str) -> Side:
    """Build both forms of a decoder with these parameters."""
    model = transformer.build(config, params, dtype=precision)
    greedy = sample.SamplingParams(temperature=0.0)
    return Side(reading.Reader(model), sample.Generator(model, eos_id=tokenizer.eos_id, sampling=greedy))


def run(
    compressor: AutoCompressor, tuned: Side, untuned: Side | None, asked: Sequence[questions.Question],
    ratios: Sequence[int], workdir: Path, *, shorten: Shorten | None = None, say: Callable[[str], Any] = print,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Compute figures by arm, with the mean positions of its prompts; arms with a ratio are named by it: vectors-8.

    Args:
      untuned: the decoder without adapters; None = it has no adapters.
      shorten: (texts, ratio) -> shorter texts, by LLMLingua; None = it is not installed.
    """
    found: dict[str, list[answering.Answered]] = {}
    positions: dict[str, float] = {}

    def add(name: str, side: Side, prompts: Callable[[], list[Prompt]]) -> None:
        def compute() -> list[Any]:
            with terminal.progress(2 * len(asked)) as advance:
                given = prompts()
                mine = answering.answered(
                    side.reader, side.generate, compressor.tokenizer, asked, given, progress=advance
                )  # fmt: skip
                lengths = [len(prompt.ids) for prompt in given]
            return [[*each, length] for each, length in zip(mine, lengths)]

        rows, was_there = store.kept(workdir / f"{name}.json", compute)
        found[name] = [answering.Answered(nats, said) for nats, said, _ in rows]
        positions[name] = sum(length for *_, length in rows) / len(rows)
        say(f"{name}: {positions[name]:.0f} positions a prompt" + (" (finished before)" if was_there else ""))

    for arm in answering.CLEAR_ARMS:
        add(arm, tuned, lambda arm=arm: answering.prompts(compressor, asked, arm))
    if untuned is not None:
        add("untuned", untuned, lambda: answering.plain(asked))
    for ratio in ratios:
        own = compressor.with_ratio(ratio)
        for arm in answering.VECTOR_ARMS:
            add(f"{arm}-{ratio}", tuned, lambda own=own, arm=arm: answering.prompts(own, asked, arm))
    for ratio in [] if shorten is None else sorted({*ratios, *(more * max(ratios) for more in FURTHER)}):

        def texts(ratio: int = ratio) -> list[str]:
            return shorten([compressor.tokenizer.decode(each.context.tolist()) for each in asked], ratio)

        made, _ = store.kept(workdir / f"shortened-{ratio}.json", texts)
        add(f"llmlingua-{ratio}", tuned, lambda made=made: _in_clear(compressor, asked, made))
    rows = answering.figures(found, asked)
    return {name: {"positions": positions[name], **row} for name, row in rows.items()}


def _in_clear(compressor: AutoCompressor, asked: Sequence[questions.Question], made: Sequence[str]) -> list[Prompt]:
    """Prompts of shortened passages, as plain text, and questions."""
    kept = [np.array(compressor.tokenizer.encode(text, add_special=False), np.int32) for text in made]
    return [answering.in_clear(compressor, each, one.question) for each, one in zip(kept, asked)]


def of_questions(
    compressor: AutoCompressor, checkpoint: weights.Checkpoint, precision: str, asked: Sequence[questions.Question],
    ratios: Sequence[int], workdir: Path,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Compute figures by arm, also of LLMLingua and of the decoder without adapters if they exist."""
    tokenizer = compressor.tokenizer
    tuned, untuned = side(checkpoint.config, compressor.reader(checkpoint.params), tokenizer, precision), None
    if compressor.config.lora is not None:
        untuned = side(checkpoint.config, checkpoint.params, tokenizer, precision)
    with llmlingua.shortener(workdir, checkpoint, tokenizer, threads=environment.usable_cores()) as shorten:
        return run(compressor, tuned, untuned, asked, ratios, workdir, shorten=shorten)


def table(rows: Mapping[str, Mapping[str, Any]]) -> rich.table.Table:
    """Figures of every arm, percent with 95 % intervals."""
    shown = rich.table.Table("", "tokens a vector", "nats", "recovery", "EM", "F1", "EM retained", "F1 retained")
    for name, row in rows.items():
        arm, _, ratio = name.partition("-")
        shown.add_row(
            SAID[arm], ratio, "{:.3f}".format(row["nats"][0]),
            *(percent(row[each]) for each in ("recovery", "exact_match", "f1", "exact_match_retained", "f1_retained")),
        )  # fmt: skip
    return shown


def percent(value: Sequence[float]) -> str:
    """A share with its interval, if they exist, in percent."""
    if math.isnan(value[0]):
        return "none"
    return f"{100 * value[0]:.0f}" + ("" if math.isnan(value[1]) else f" [{100 * value[1]:.0f}, {100 * value[2]:.0f}]")
