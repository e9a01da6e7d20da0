"""Evaluate a compressor on texts that it was not trained on, versus a free baseline: keeping some of the text.

- Recovery of a continuation: (loss after nothing - loss after vectors) / (loss after nothing - loss after the whole
  text), of means over documents, each the mean of its windows; none where the whole text is no better than nothing.
  Direct: the tokens that follow at once. Far: those after 64 more tokens of plain text, which carry what the last few
  tokens of the compressed text would carry.
- Keep-last: the last tokens of the text instead of vectors, as many as there are vectors.
- Controls: the tag alone, and vectors of another text. What they recover is not content: a tag that was trained on
  books tells the decoder that a book continues.
- Read back: how often the most probable token is the right one, with teacher forcing; the same after the tag alone, and
  with vectors of zeros.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Int32

from jaxbench.compress import auto, document, reading
from jaxbench.compress.auto import AutoCompressor
from jaxbench.compress.config import TAGS
from jaxbench.text import answers

CONTEXT, CLEAR, ASKED = 512, 64, 128  # tokens compressed, plain text after them, targets after either
RECONSTRUCT, CONTINUE = TAGS.index("reconstruct"), TAGS.index("continue")
FREE, TOGETHER = 64, 8  # tokens generated freely, windows at once
RESAMPLES = 2000
Progress = Callable[[int], Any]
Made = tuple[Float[np.ndarray, "M D"], Int32[np.ndarray, " M"]]  # vectors of a window, and their positions in it


class Window(NamedTuple):
    """A piece of a text: what is compressed, and what follows."""

    document: int
    context: Int32[np.ndarray, " T"]
    following: Int32[np.ndarray, " U"]


def windows(texts: Sequence[np.ndarray], count: int, *, seed: int, context: int = CONTEXT) -> list[Window]:
    """Draw windows from the texts in turn, at a random place of each.

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
    """Vectors of tokens and their positions, computed chunk by chunk."""
    size, vectors, places = compressor.config.chunk, [], []
    for first in range(0, len(ids), size):
        found, inside = compressor.chunk(ids[first : first + size])
        vectors.append(found)
        places.append(first + inside)
    return np.concatenate(vectors), np.concatenate(places)


def compressed(compressor: AutoCompressor, drawn: Sequence[Window], store: document.Dtype = "float32") -> list[Made]:
    """Vectors of each window and their positions; vectors are rounded as in one file of all windows.

    Raises:
      ValueError: the vectors are too few for store=pq.
    """
    made = [tokens_of(compressor, window.context) for window in drawn]
    all = document.restored(document.stored(np.concatenate([vectors for vectors, _ in made]), store))
    ends = np.cumsum([len(vectors) for vectors, _ in made])[:-1]
    return [(vectors, places) for vectors, (_, places) in zip(np.split(all, ends), made)]


def _first_chunk(compressor: AutoCompressor, made: Made) -> Made:
    """Select the vectors and positions of a window's first chunk."""
    vectors, places = made
    mine = places < compressor.config.chunk
    return vectors[mine], places[mine]


def bounds(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], *, start: int,
    progress: Progress = lambda count: None,
) -> dict[str, Float[np.ndarray, "W 2"]]:  # fmt: skip
    """Loss of each window, in nats per token, direct and far, after nothing, the tag alone, and the whole text.

    Args:
      start: token before the text.
    """
    size, tag = compressor.config.decoder.vocab_size, compressor.tag(CONTINUE)
    none = np.zeros((0, tag.shape[1]), np.float32)
    arms = {
        "none": [reading.behind_text(w.context[:0], w.following, start=start) for w in drawn],
        "full": [reading.behind_text(w.context, w.following, start=start) for w in drawn],
        "tag": [reading.behind_vectors(none, tag, w.following, size=size) for w in drawn],
    }
    return _losses(reader, arms, len(drawn), progress)


def continuation(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], made: Sequence[Made], *, start: int,
    progress: Progress = lambda count: None,
) -> dict[str, Float[np.ndarray, "W 2"]]:  # fmt: skip
    """The same after the last part of the text, after its vectors, and after those of another text.

    Args:
      made: vectors and positions of each window, as `compressed` returns them; the same below.
    """
    size, tag = compressor.config.decoder.vocab_size, compressor.tag(CONTINUE)
    kept = [w.context[-len(vectors) :] for (vectors, _), w in zip(made, drawn)]
    arms = {
        "keep": [reading.behind_text(k, w.following, start=start) for k, w in zip(kept, drawn)],
        "vectors": [
            reading.behind_vectors(vectors, tag, w.following, size=size) for (vectors, _), w in zip(made, drawn)
        ],
        "aligned": [
            reading.behind_vectors(vectors, tag, w.following, size=size, places=np.append(places, len(w.context)))
            for (vectors, places), w in zip(made, drawn)
        ],
    }
    other = of_others([window.document for window in drawn])
    if other is not None:
        arms["others"] = [reading.behind_vectors(made[j][0], tag, w.following, size=size) for j, w in zip(other, drawn)]
    return _losses(reader, arms, len(drawn), progress)


def of_others(keys: Sequence[Any]) -> list[int] | None:
    """For each key, such as a document's, the index of the next different one; None if all are the same."""
    count = len(keys)
    if len(set(keys)) < 2:
        return None
    following = ([(i + step) % count for step in range(1, count)] for i in range(count))
    return [next(j for j in mine if keys[j] != keys[i]) for i, mine in enumerate(following)]


def _losses(
    reader: reading.Reader, arms: Mapping[str, Sequence[reading.Row]], count: int, progress: Progress
) -> dict[str, Float[np.ndarray, "W 2"]]:
    heard = reader([row for rows in arms.values() for row in rows], progress=progress)
    found = {}
    for number, name in enumerate(arms):
        mine = heard[number * count : (number + 1) * count]
        found[name] = np.array([[each.losses[:ASKED].mean(), each.losses[CLEAR:].mean()] for each in mine])
    return found


def read_back(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], made: Sequence[Made], *,
    progress: Progress = lambda count: None,
) -> dict[str, Float[np.ndarray, " W"]]:  # fmt: skip
    """Share of the tokens of each window's first chunk that are read back, from zeros and from vectors."""
    size, tag, rows = compressor.config.decoder.vocab_size, compressor.tag(RECONSTRUCT), []
    for window, own in zip(drawn, made, strict=True):
        chunk = window.context[: compressor.config.chunk]
        vectors, places = _first_chunk(compressor, own)
        ends = np.append(places, len(chunk))
        rows.append(reading.behind_vectors(np.zeros_like(vectors), tag, chunk, size=size))
        rows.append(reading.behind_vectors(vectors, tag, chunk, size=size))
        rows.append(reading.behind_vectors(vectors, tag, chunk, size=size, places=ends))
    hits = np.array([each.hits.mean() for each in reader(rows, progress=progress)]).reshape(-1, 3)
    return dict(zip(("zeros", "vectors", "aligned"), hits.T))


def said_freely(
    generate: Callable[..., Any], compressor: AutoCompressor, drawn: Sequence[Window], made: Sequence[Made], *,
    progress: Progress = lambda count: None,
) -> dict[str, Float[np.ndarray, " W"]]:  # fmt: skip
    """Score what the decoder generates of each window's first chunk, each token after its own earlier ones.

    Returns:
      `same`: share of FREE tokens, or of a shorter chunk, that are right at their position; one extra word shifts the
      rest. `words`: F1 of the words, at any position. `others`: F1 versus the next window's text, which has common
      words too; NaN if there is one window only.
    """
    size, tag, prompts = compressor.config.decoder.vocab_size, compressor.tag(RECONSTRUCT), []
    for own in made:
        table = np.concatenate([_first_chunk(compressor, own)[0], tag])
        prompts.append(auto.Prompt([*range(size, size + len(table))], table.astype(np.float32)))
    count, said = min(FREE, compressor.config.chunk, *(len(window.context) for window in drawn)), []
    for first in range(0, len(prompts), TOGETHER):
        ids, table = auto.joined(prompts[first : first + TOGETHER], size)
        tokens = generate(ids, vectors=table, max_new_tokens=count, seed=0).tokens
        said += list(np.pad(tokens, ((0, 0), (0, count - tokens.shape[1])), constant_values=-1))
        progress(len(ids))
    wanted = [window.context[:count] for window in drawn]
    texts, right = ([compressor.tokenizer.decode(ids[ids >= 0].tolist()) for ids in each] for each in (said, wanted))
    others = np.array([answers.f1(own, [text]) for own, text in zip(texts, right[1:] + right[:1])])
    return {
        "same": np.array([(own == ids).mean() for own, ids in zip(said, wanted)]),
        "words": np.array([answers.f1(own, [text]) for own, text in zip(texts, right)]),
        "others": others if len(drawn) > 1 else np.full(len(drawn), np.nan),
    }


def known(
    reader: reading.Reader, compressor: AutoCompressor, drawn: Sequence[Window], *,
    progress: Progress = lambda count: None,
) -> Float[np.ndarray, " W"]:  # fmt: skip
    """Share read back after the tag alone: what the decoder predicts anyway. Vectors of zeros disturb it."""
    size, tag = compressor.config.decoder.vocab_size, compressor.tag(RECONSTRUCT)
    none = np.zeros((0, tag.shape[1]), np.float32)
    chunks = [window.context[: compressor.config.chunk] for window in drawn]
    rows = [reading.behind_vectors(none, tag, chunk, size=size) for chunk in chunks]
    return np.array([each.hits.mean() for each in reader(rows, progress=progress)])


def recovery(
    losses: Mapping[str, np.ndarray], name: str, documents: Sequence[int], protocol: int
) -> tuple[float, float, float]:
    """Recovery of a continuation with a 95 % interval over documents; protocol: 0 direct, 1 far."""
    return share(*(losses[each][:, protocol] for each in ("none", "full", name)), documents, better="lower")


def gap(losses: Mapping[str, np.ndarray], documents: Sequence[int], protocol: int) -> tuple[float, float, float]:
    """What the whole text lowers the loss by, in nats per token, of which recovery is a share; arguments as above."""
    return interval(np.subtract, *(by_document(losses[each][:, protocol], documents) for each in ("none", "full")))


def share(
    nothing: np.ndarray, everything: np.ndarray, own: np.ndarray, documents: Sequence[int], *,
    better: Literal["lower", "higher"],
) -> tuple[float, float, float]:  # fmt: skip
    """Position of `own` from `nothing` (0) to `everything` (1), of means over documents, with a 95 % interval.

    NaN unless `everything` is better than `nothing`: otherwise what is worse than both would have a share above 1. If
    the interval of that gap reaches 0, the share may be any number, and only its ends are NaN.

    Args:
      better: which values are: lower losses, or higher scores.
    """
    samples = [by_document(values, documents) for values in (nothing, everything, own)]
    sign = 1.0 if better == "lower" else -1.0
    ends = interval(lambda nothing, everything: sign * (nothing - everything), *samples[:2])
    if not ends[0] > 0:
        return math.nan, math.nan, math.nan
    with np.errstate(divide="ignore", invalid="ignore"):  # resamples with equal ends
        found = interval(lambda nothing, everything, own: (nothing - own) / (nothing - everything), *samples)
    return found if ends[1] > 0 else (found[0], math.nan, math.nan)


def interval(statistic: Callable[..., Any], *samples: np.ndarray) -> tuple[float, float, float]:
    """A function of means over documents, and its 95 % bootstrap interval (percentiles; samples paired by document)."""

    def of_means(*values: np.ndarray, axis: int = -1) -> Any:
        return statistic(*(value.mean(axis=axis) for value in values))

    value = float(of_means(*samples))
    if len(samples[0]) < 2:
        return value, float("nan"), float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)  # a share with equal ends: no interval
        drawn = scipy.stats.bootstrap(
            samples, of_means, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
            rng=np.random.default_rng(0),
        )  # fmt: skip
    return value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def by_document(values: Float[np.ndarray, " W"], documents: Sequence[int]) -> Float[np.ndarray, " documents"]:
    """Mean of each document's values."""
    numbers = np.asarray(documents)
    return np.array([values[numbers == number].mean() for number in np.unique(numbers)])


def mean_interval(values: np.ndarray, documents: Sequence[int]) -> tuple[float, float, float]:
    """Mean over documents with its 95 % interval; of shares that are all 0 or all 1, Wilson's (1927) over documents.

    Resamples of those have no spread, and six texts without a hit do not prove that there is none.
    """
    means = by_document(values, documents)
    if len(means) > 1 and np.isin(means, (0.0, 1.0)).all() and (means == means[0]).all():
        ends = scipy.stats.binomtest(int(means.sum()), len(means)).proportion_ci(0.95, method="wilson")
        return float(means[0]), float(ends.low), float(ends.high)
    return interval(lambda mean: mean, means)
