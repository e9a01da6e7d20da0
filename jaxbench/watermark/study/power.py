"""Measure detection power by text length: true-positive rates at fixed false-positive rates, with intervals.

Every text is a continuation by the model at the given temperature, without top-k, top-p or an end token (the bars are
for a number of tokens), under its own key. One generation serves all lengths: a text of 50 tokens is the beginning of
one of 200. Detection runs twice: with the prompt as context, so that every generated token can be scored, and on the
continuation alone, where the first tokens lack context. The interval is Wilson's at 95 %; a bar is reached if the
interval's lower end reaches it. Where there are fewer prompts than texts, the interval is that of as many texts as
there are different prompts: how easily a text is marked depends on its prompt.

Finished batches are files under workdir/chunks, so an interrupted run resumes where it stopped, and a run of more texts
reuses those of a smaller one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from jaxbench import outputs, philox, sample, store
from jaxbench.config import Base, TransformerConfig, config_id
from jaxbench.generation import decoder, flax_decoder
from jaxbench.pretrained import tokenizer, weights
from jaxbench.text import packing, passages
from jaxbench.watermark import config, green_lists, logits_processor, reference, significance
from jaxbench.watermark.keys import Key
from jaxbench.watermark.study import detectability


class Bar(Base):
    """A true-positive rate that the interval's lower end must reach."""

    scheme: str  # name of a row
    num_tokens: int = Field(gt=0)
    level: float = Field(gt=0, lt=1)  # false-positive rate
    rate: float = Field(gt=0, le=1)


class Power(Base):
    """Settings of a power run: configs/watermark/power.yaml."""

    schemes: dict[str, config.Scheme] = Field(min_length=1)  # name of a row -> scheme
    model: str = "default"
    dtype: Literal["float32", "bfloat16"] = "float32"  # if --weights is not given (generation/decoder.py: choose)
    temperature: float = Field(default=1.0, gt=0)
    num_texts: int = Field(default=1000, ge=1)
    prompt_tokens: int = Field(default=32, ge=1)
    lengths: tuple[config.Count, ...] = Field(default=(25, 50, 100, 200), min_length=1)  # tokens that detection sees
    levels: tuple[config.Level, ...] = Field(default=(1e-2, 1e-3, 1e-5), min_length=1)  # false-positive rates
    batch_size: int = Field(default=32, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**64)  # of the ordinary randomness
    passphrase: str = Field(default="power", min_length=1)  # the keys, one per text, are derived from it
    bars: tuple[Bar, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Power:
        check_names(self.schemes, "power")
        for scheme in self.schemes.values():
            config.check_generates(scheme, "power")
        for bar in self.bars:
            if bar.scheme not in self.schemes or bar.num_tokens not in self.lengths or bar.level not in self.levels:
                raise ValueError(
                    f"power: bar {bar.model_dump()} names no measured cell; schemes are {', '.join(self.schemes)}, "
                    f"lengths {list(self.lengths)}, levels {list(self.levels)}"
                )
        return self


class Cell(NamedTuple):
    """One scheme at one length and level."""

    scheme: str
    num_tokens: int  # generated tokens that detection sees
    level: float
    sees_prompt: bool  # True: the prompt is context, so that every generated token can be scored
    rate: detectability.Rate
    num_scored: float  # mean number of scored tokens
    bar: float | None  # what the interval's lower end must reach


def text_keys(settings: Power, name: str, num_texts: int) -> list[Key]:
    """Return the keys of the texts of one scheme."""
    root = Key.from_passphrase(settings.passphrase)
    return [root.derive(f"{name} {text}") for text in range(num_texts)]


def prompts(settings: Power, encoder: Any, path: str | Path | None) -> np.ndarray:
    """Return prompts [N P] (int32): pieces of the texts in a random order that does not depend on num_texts.

    If there are too few, they are reused, with another key and other randomness.
    """
    texts = passages.read_texts(path)
    found = passages.cut(encoder, texts, num_tokens=settings.prompt_tokens, max_passages=10**6).tokens
    words = philox.words(settings.seed, step=0, site="watermark/power", rows=np.zeros(1), num_elements=len(found))
    order = np.argsort(words[0], kind="stable")
    return found[order[np.arange(settings.num_texts) % len(found)]]


def generate(
    settings: Power, name: str, given: np.ndarray, *, model: Any, workdir: Path,
    say: Callable[[str], None] = lambda line: None,
) -> np.ndarray:  # fmt: skip
    """Return continuations [N max(lengths)] of prompts [N P] under one scheme; finished batches are read back."""
    scheme, keys, chunks = settings.schemes[name], text_keys(settings, name, len(given)), []

    @functools.cache
    def programs() -> tuple[logits_processor.Watermark, sample.Generator]:
        vocab_size = model.vocab_size
        lists = green_lists.lists_of(scheme, vocab_size=vocab_size)
        processor = logits_processor.Watermark(scheme, vocab_size=vocab_size, green_lists=lists)
        sampling = sample.SamplingParams(temperature=settings.temperature)
        return processor, sample.Generator(model, eos_id=None, sampling=sampling, processors=[processor])

    def continued(rows: range) -> np.ndarray:
        processor, generator = programs()
        begun = time.monotonic()
        state = processor.state(keys[rows.start : rows.stop], seed=settings.seed, row_ids=list(rows))
        output = generator(
            [given[i].tolist() for i in rows],
            max_new_tokens=max(settings.lengths),
            seed=settings.seed,
            row_ids=list(rows),
            processor_states=[state],
        )
        rate = output.tokens.size / (time.monotonic() - begun)
        say(f"{name}: {rows.stop} of {len(given)} texts, {rate:.0f} tokens/s")
        return output.tokens.astype(np.int32)

    for start in range(0, len(given), settings.batch_size):
        rows = range(start, min(start + settings.batch_size, len(given)))
        path = workdir / "chunks" / f"{slug(name)}-{start:06d}-{len(rows)}.npy"
        chunks.append(store.kept(path, functools.partial(continued, rows), read=np.load, write=_save)[0])
    return np.concatenate(chunks)


def slug(name: str) -> str:
    """Return a scheme's name as the prefix of its batches' file names."""
    return "".join(c if c.isalnum() else "-" for c in name)


def check_names(names: Iterable[str], place: str) -> None:
    """Raise a ValueError if two schemes' batches would be the same files."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(slug(name), name)) != name:
            raise ValueError(
                f"{place}: schemes {other!r} and {name!r} would share the files {slug(name)}-*; rename one"
            )


def _save(path: Path, array: np.ndarray) -> None:
    with outputs.whole(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)


def cells(settings: Power, name: str, given: np.ndarray, made: np.ndarray, *, vocab_size: int) -> Iterator[Cell]:
    """Yield the rates of one scheme at every length and level, with and without the prompt as context."""
    scheme, keys = settings.schemes[name], text_keys(settings, name, len(made))
    distinct = len(np.unique(given, axis=0))
    lists = green_lists.lists_of(scheme, vocab_size=vocab_size)
    for sees_prompt in (True, False):
        prompt = given if sees_prompt else given[:, :0]
        for length in settings.lengths:
            tokens = np.concatenate([prompt, made[:, :length]], axis=1)
            evidence = reference.evidence(
                scheme, keys, tokens, vocab_size=vocab_size, prompt_lengths=prompt.shape[1], green_lists=lists
            )
            scores = significance.score(scheme, evidence, vocab_size=vocab_size)
            for level in settings.levels:
                bar = next(
                    (b.rate for b in settings.bars if (b.scheme, b.num_tokens, b.level) == (name, length, level)), None
                )
                rate = detectability.detected(scores.p_value, level, distinct=distinct)
                yield Cell(name, length, level, sees_prompt, rate, float(scores.num_scored.mean()), bar)


def run(
    settings: Power,
    *,
    path: str | Path | None = None,
    workdir: str | Path,
    options: decoder.Options = decoder.Options("xla"),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Generate, detect, write power.json into workdir, which also keeps finished batches, and return its content.

    The prompts are cut from the texts of `path` (passages.read_texts); None = the packaged default text.

    Raises:
      ValueError: as check_length and choose, or workdir has the batches of another configuration or of other kernels.
    """
    workdir, begun = Path(workdir), time.process_time()
    given = prompts(settings, tokenizer.load_tokenizer(settings.model), path)
    num_prompts = len(np.unique(given, axis=0))
    shape = weights.read_config(settings.model)
    check_length(settings.prompt_tokens + max(settings.lengths), shape.max_seq_len)
    choice = choose(settings, options, shape, say=say)
    extra = {"text_sha256": packing.text_sha256(path), "model_sha256": weights.checksum(settings.model)}
    identity = batches_id(settings, choice, extra)
    model = flax_decoder.load(settings.model, choice).model
    store.claim(workdir / "chunks", identity)
    measured: list[Cell] = []
    for name in settings.schemes:
        tokens = generate(settings, name, given, model=model, workdir=workdir, say=say)
        measured += cells(settings, name, given, tokens, vocab_size=shape.vocab_size)
    missed = [cell for cell in measured if is_missed(cell)]
    result = {
        "passed": not missed,
        "num_texts": len(given),
        "num_prompts": num_prompts,
        "cpu_s": round(time.process_time() - begun, 1),
        "config_id": identity,
        **extra,
        "kernels": choice.identity(),
        "config": settings.model_dump(mode="json"),
        "cells": [cell._asdict() | {"rate": cell.rate._asdict()} for cell in measured],
    }
    outputs.write_json(workdir / "power.json", result)
    for cell in measured:
        say(line(cell))
    if num_prompts < len(given):
        say(f"{len(given)} texts continue {num_prompts} different prompts: intervals are those of {num_prompts} texts")
    return result


def choose(
    settings: Power,
    options: decoder.Options,
    shape: TransformerConfig,
    *,
    say: Callable[[str], None],
    rows: str = "power: batch_size",
) -> decoder.Choice:
    """Choose the kernels of a run; `say` reports why they are not native. `rows` names the batch size in errors.

    Raises:
      ValueError: they are not available, or do not support the batch size.
    """
    choice = decoder.choose(options, "cpu", dtype=settings.dtype, config=lambda: shape)
    decoder.check_rows(choice, settings.batch_size, rows)
    if choice.note:
        say(choice.note)
    return choice


def batches_id(settings: Power, choice: decoder.Choice, extra: dict[str, Any]) -> str:
    """Return the id of everything that decides the batches, followed by the kernels if they are not xla."""
    return config_id(settings, exclude=("bars", "levels", "num_texts"), extra=extra) + choice.suffix(settings.dtype)


def check_length(num_tokens: int, max_seq_len: int) -> None:
    """Raise a ValueError if texts with their prompts are longer than the model's context."""
    if num_tokens > max_seq_len:
        raise ValueError(
            f"power: {num_tokens} tokens of prompt and text do not fit the model's {max_seq_len} positions"
        )


def is_missed(cell: Cell) -> bool:
    """Return whether the interval's lower end misses the cell's bar; bars apply only with the prompt as context."""
    return cell.bar is not None and cell.sees_prompt and cell.rate.low < cell.bar


def line(cell: Cell) -> str:
    """Format one cell as text."""
    has_bar = cell.bar is not None and cell.sees_prompt
    bar = f"  bar {cell.bar:g} {'MISSED' if is_missed(cell) else 'reached'}" if has_bar else ""
    sight = "prompt as context" if cell.sees_prompt else "continuation only"
    return (
        f"{cell.scheme:<22} {cell.num_tokens:>4} tokens, {sight}, {cell.num_scored:5.1f} scored, FPR {cell.level:<6g} "
        f"TPR {cell.rate.value:.3f} [{cell.rate.low:.3f}, {cell.rate.high:.3f}]{bar}"
    )
