"""Figures of a compressor on texts that it was not trained on, beside what costs nothing: keeping some of the text.

- Recovery of a continuation: (loss behind nothing - loss behind vectors) / (loss behind nothing - loss behind the whole
  text), of means over windows. Direct: the tokens that follow at once. Far: those behind 64 more in clear, which say
  what the last few tokens would have said.
- Keep-last: the last 1/ratio of the tokens in place of vectors, as many of the one as of the other.
- Read back: how often the most probable token is the right one, each behind the right ones before it; and with vectors
  of zeros, which is what the decoder knows without any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Int32

from jaxbench.compress import reading
from jaxbench.compress.auto import AutoCompressor
from jaxbench.compress.config import TAGS

CONTEXT, CLEAR, ASKED = 512, 64, 128  # tokens that are compressed, in clear behind them, asked for behind either
RECONSTRUCT, CONTINUE = TAGS.index("reconstruct"), TAGS.index("continue")
RESAMPLES = 2000


class Window(NamedTuple):
    """A piece of a text: what is compressed, and what follows."""

    document: int
    context: Int32[np.ndarray, " T"]
    following: Int32[np.ndarray, " U"]


def windows(texts: Sequence[np.ndarray], count: int, *, seed: int, context: int = CONTEXT) -> list[Window]:
    """Windows drawn from texts in turn, each text's own at random.

    Raises:
      ValueError: no text is long enough.
    """
    length, random = context + CLEAR + ASKED, np.random.default_rng(seed)
    fitting = [(i, text) for i, text in enumerate(texts) if len(text) >= length]
    if not fitting:
        raise ValueError(f"evaluate: the longest text has {max(map(len, texts), default=0)} tokens; wanted {length}")
    found = []
    for number in range(count):
        i, text = fitting[number % len(fitting)]
        start = int(random.integers(len(text) - length + 1))
        found.append(Window(i, text[start : start + context], text[start + context : start + length]))
    return found


def tokens_of(compressor: AutoCompressor, ids: Int32[np.ndarray, " T"]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of tokens and their places, chunk by chunk."""
    size, vectors, places = compressor.config.chunk, [], []
    for first in range(0, len(ids), size):
        found, inside = compressor.chunk(ids[first : first + size])
        vectors.append(found)
        places.append(first + inside)
    return np.concatenate(vectors), np.concatenate(places)


def continuation(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], ratios: Sequence[int], *, start: int,
    progress: Callable[[int], Any] = lambda count: None,
) -> dict[str, Float[np.ndarray, "W 2"]]:  # fmt: skip
    """Loss of each window, nats a token, direct and far, behind nothing, the whole text, its last part and vectors.

    Args:
      start: token that text stands behind.
    """
    size, tag = compressor.config.decoder.vocab_size, compressor.tags[CONTINUE]
    arms = {
        "none": [reading.behind_text(w.context[:0], w.following, start=start) for w in drawn],
        "full": [reading.behind_text(w.context, w.following, start=start) for w in drawn],
    }
    for ratio in ratios:
        own, kept = compressor.at(ratio), [w.context[-(len(w.context) // ratio) :] for w in drawn]
        made = [tokens_of(own, w.context) for w in drawn]
        arms[f"keep {ratio}"] = [reading.behind_text(k, w.following, start=start) for k, w in zip(kept, drawn)]
        arms[f"vectors {ratio}"] = [
            reading.behind_vectors(vectors, tag, w.following, size=size) for (vectors, _), w in zip(made, drawn)
        ]
        arms[f"aligned {ratio}"] = [
            reading.behind_vectors(vectors, tag, w.following, size=size, places=np.append(places, len(w.context)))
            for (vectors, places), w in zip(made, drawn)
        ]
    heard = reader([row for rows in arms.values() for row in rows], progress=progress)
    found = {}
    for number, name in enumerate(arms):
        mine = heard[number * len(drawn) : (number + 1) * len(drawn)]
        found[name] = np.array([[each.losses[:ASKED].mean(), each.losses[CLEAR:].mean()] for each in mine])
    return found


def read_back(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], ratios: Sequence[int], *,
    progress: Callable[[int], Any] = lambda count: None,
) -> dict[str, Float[np.ndarray, " W"]]:  # fmt: skip
    """Share of the tokens of each window's first chunk that are read back, by ratio, and with vectors of zeros."""
    size, tag, found = compressor.config.decoder.vocab_size, compressor.tags[RECONSTRUCT], {}
    for ratio in ratios:
        own, rows = compressor.at(ratio), []
        chunks = [window.context[: compressor.config.chunk] for window in drawn]
        made = [own.chunk(chunk) for chunk in chunks]
        for chunk, (vectors, places) in zip(chunks, made):
            rows.append(reading.behind_vectors(vectors, tag, chunk, size=size))
            rows.append(
                reading.behind_vectors(vectors, tag, chunk, size=size, places=np.append(places, len(chunk)))
            )  # fmt: skip
            rows.append(reading.behind_vectors(np.zeros_like(vectors), tag, chunk, size=size))
        hits = np.array([each.hits.mean() for each in reader(rows, progress=progress)]).reshape(-1, 3)
        for number, name in enumerate(("vectors", "aligned", "zeros")):
            found[f"{name} {ratio}"] = hits[:, number]
    return found


def recovery(
    losses: Mapping[str, np.ndarray], name: str, documents: Sequence[int], protocol: int
) -> tuple[float, float, float]:
    """Recovery of a continuation with a 95 % interval over documents; protocol: 0 direct, 1 far."""
    none, full, own = (_by_document(losses[each][:, protocol], documents) for each in ("none", "full", name))
    return interval(lambda none, full, own: (none - own) / (none - full), none, full, own)


def interval(statistic: Callable[..., Any], *samples: np.ndarray) -> tuple[float, float, float]:
    """A function of means over documents, and its 95 % bootstrap interval (percentiles), documents drawn together."""

    def of_means(*values: np.ndarray, axis: int = -1) -> Any:
        return statistic(*(value.mean(axis=axis) for value in values))

    value = float(of_means(*samples))
    if len(samples[0]) < 2:
        return value, float("nan"), float("nan")
    drawn = scipy.stats.bootstrap(
        samples, of_means, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def _by_document(values: np.ndarray, documents: Sequence[int]) -> np.ndarray:
    """Mean of each document's values."""
    numbers = np.asarray(documents)
    return np.array([values[numbers == number].mean() for number in np.unique(numbers)])


def mean_interval(values: np.ndarray, documents: Sequence[int]) -> tuple[float, float, float]:
    """Mean over documents with its 95 % interval."""
    return interval(lambda mean: mean, _by_document(values, documents))
