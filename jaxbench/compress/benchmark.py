"""Measure how fast texts are compressed and questions over them get a first token, and the memory that takes."""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from jaxbench.compress import artifact, auto
from jaxbench.compress.auto import AutoCompressor
from jaxbench.compress.config import CompressorConfig, is_trained, starting_params
from jaxbench.measure import worker
from jaxbench.pretrained import tokenizer, weights

SPREAD = 3  # timed calls per median; fewer in `lengths` if they take LONG in total
LONG = 20.0  # seconds


def untrained(
    name: str, num_layers: int, *, model: str | None, precision: str, twin: types.ModuleType | None
) -> AutoCompressor:
    """Make an untrained compressor from a decoder's first layers, only for speed; arguments as of `from_pretrained`.

    Raises:
      ValueError: the name is unknown, or the decoder has fewer layers.
    """
    ratio, checkpoint = auto.check_name(name), weights.load_checkpoint(model)
    shape = CompressorConfig(decoder=checkpoint.config, num_layers=num_layers)
    params = {
        name: each for name, each in starting_params(shape, checkpoint.params, seed=0).items() if is_trained(name)
    }
    trained = artifact.Trained(shape, params, checkpoint.sha256, "untrained", {})
    return AutoCompressor.from_weights(trained, checkpoint, tokenizer.load_tokenizer(model), ratio, precision, twin)


def lengths(
    compressor: AutoCompressor, text: str, counts: Sequence[int], *, say: Callable[[str], Any] = print
) -> list[dict[str, float]]:
    """Measure seconds and tokens per second of texts of `counts` tokens, tokenising included.

    Args:
      text: its beginnings are compressed; it is repeated if it is too short.
    """
    ids = compressor.tokenizer.encode(text, add_special=False)
    compressor.compress(compressor.tokenizer.decode(ids[:300]))  # one-time work
    found = []
    for count in counts:
        piece = beginning(compressor, ids, count)
        seconds: list[float] = []
        while len(seconds) < SPREAD and sum(seconds) < LONG:
            started = time.perf_counter()
            result = compressor.compress(piece)
            seconds.append(time.perf_counter() - started)
        middle = statistics.median(seconds)
        row = {
            "tokens": result.original_length, "vectors": result.compressed_length, "seconds": middle,
            "least": min(seconds), "most": max(seconds), "tokens_a_second": result.original_length / middle,
            "peak_mb": worker.peak_bytes() / 1e6,  # of this process so far
        }  # fmt: skip
        rate, peak = row["tokens_a_second"], row["peak_mb"]
        say(f"{row['tokens']} tokens: {middle:.2f} s, {rate:.0f} tokens/s, peak {peak:.0f} MB")
        found.append(row)
    return found


def beginning(compressor: AutoCompressor, ids: list[int], count: int) -> str:
    """Make a text of the first `count` tokens, which are repeated if there are too few."""
    return compressor.tokenizer.decode((ids * -(-count // len(ids)))[:count])


def documents(
    compressor: AutoCompressor, text: str, *, count: int, tokens: int, batches: Sequence[int],
    say: Callable[[str], Any] = print,
) -> list[dict[str, float]]:  # fmt: skip
    """Measure seconds and texts per minute of `count` texts of `tokens` tokens, by the number of chunks at once."""
    ids = compressor.tokenizer.encode(text, add_special=False)
    ids = ids * -(-count * tokens // len(ids))
    pieces = [compressor.tokenizer.decode(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]
    found = []
    for batch in batches:
        compressor.compress_all(pieces[:1], batch=batch)  # compiles
        seconds = []
        for _ in range(SPREAD):
            started = time.perf_counter()
            made = compressor.compress_all(pieces, batch=batch)
            seconds.append(time.perf_counter() - started)
        middle, read = statistics.median(seconds), sum(each.original_length for each in made)
        row = {
            "batch": batch, "documents": count, "tokens": read, "seconds": middle, "least": min(seconds),
            "most": max(seconds), "tokens_a_second": read / middle, "documents_a_minute": 60 * count / middle,
        }  # fmt: skip
        say(
            f"{count} texts of {tokens} tokens, {batch} chunks at once: {row['tokens_a_second']:.0f} tokens/s, "
            f"{row['documents_a_minute']:.0f} texts a minute"
        )
        found.append(row)
    return found


def first_token(
    compressor: AutoCompressor, generate: Callable[..., Any], text: str, question: str, *, over: int, new_tokens: int
) -> dict[str, float]:
    """Measure seconds to the first token of an answer over a compressed text, and tokens per second after it.

    Args:
      generate: a Generator of the compressor's decoder.
      text: the question is about its first `over` tokens; it is repeated if it is too short.
    """
    ids = compressor.tokenizer.encode(text, add_special=False)
    result = compressor.compress(beginning(compressor, ids, over))
    prompt = compressor.prompt(result, question)
    options = {"vectors": prompt.vectors, "seed": 0}

    def timed(count: int) -> float:
        generate([prompt.ids], max_new_tokens=count, **options)  # compiles
        seconds = []
        for _ in range(SPREAD):
            started = time.perf_counter()
            generate([prompt.ids], max_new_tokens=count, **options)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    first, whole = timed(1), timed(new_tokens)
    return {
        "tokens": result.original_length, "prompt": len(prompt.ids), "vectors": len(prompt.vectors),
        "first_token_s": first, "tokens_a_second": (new_tokens - 1) / (whole - first),
    }  # fmt: skip
