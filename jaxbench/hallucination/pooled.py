"""Pool token features over a response or its sentences, as detectors take them (S file)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxbench.hallucination import lexical, sentences
from jaxbench.hallucination.response_features import ResponseFeatures, finite_states

HEADS = ("external", "context_mass", "lookback")
SURPRISE = (
    "loss", "entropy", "gain", "loss_without", "entropy_gain", "worst_gain", "no_gain_share", "largest_loss",
    "novel_gain", "novel_loss",
)  # fmt: skip


class Pooled(NamedTuple):
    """One row per part (a response, or a sentence of it), by family of features; NaN-free."""

    families: dict[str, np.ndarray]  # name -> [parts, columns]
    spans: list[tuple[int, int]]  # characters of the parts


def pool(features: ResponseFeatures, response: str, lexicon: lexical.Lexicon, *, by_sentence: bool) -> Pooled:
    """Pool features over a response's parts."""
    spans = sentences.sentences(response) if by_sentence else [(0, len(response))]
    part = sentences.tokens_of(spans, features["offsets"])
    count = np.bincount(part, minlength=len(spans)).astype(np.float64)

    def mean(values: np.ndarray, of: np.ndarray = part, over: np.ndarray = count) -> np.ndarray:
        """Means [parts, columns] of values [tokens, columns]."""
        summed = np.zeros((len(spans), values.shape[1]))
        np.add.at(summed, of, values)
        return summed / np.maximum(over, 1)[:, None]

    families = {name: mean(features[name].reshape(-1, len(part)).T.astype(np.float64)) for name in HEADS}
    families["states"] = mean(finite_states(features).astype(np.float64))
    lens = part[features["parametric_slots"]]
    lens_count = np.bincount(lens, minlength=len(spans)).astype(np.float64)
    parametric = mean(features["parametric"].astype(np.float64), lens, lens_count)
    parametric[lens_count == 0] = features["parametric"].mean(0)
    families["parametric"] = parametric
    tokens = lexical.tokens(response)
    families["lexical"] = lexical_counts(tokens, lexicon, spans)
    families["surprise"] = _surprise(features, part, len(spans), _novel(tokens, lexicon, features["offsets"]))
    return Pooled(families, spans)


def lexical_counts(tokens: list[lexical.Token], lexicon: lexical.Lexicon, spans: list[tuple[int, int]]) -> np.ndarray:
    """Counts of each part [parts, columns]; a word belongs to the part that it begins in."""
    parts = [[token for token in tokens if start <= token.start < end] for start, end in spans]
    return np.stack([lexical.counts(part, lexicon) for part in parts])


def _novel(tokens: list[lexical.Token], lexicon: lexical.Lexicon, offsets: np.ndarray) -> np.ndarray:
    """True for the reader's tokens that end in a content word which the context does not have."""
    marked = np.zeros(int(offsets.max(initial=0)) + 1, bool)
    for token in tokens:
        if token.is_content and lexical.is_novel(token, lexicon):
            marked[token.start : token.end] = True
    return marked[np.maximum(offsets[:, 1] - 1, 0)]


def _surprise(features: ResponseFeatures, part: np.ndarray, num: int, novel: np.ndarray) -> np.ndarray:
    """Compute the columns of SURPRISE of each part; gain: how much the context lowers a token's loss."""
    loss, gain = features["loss"].astype(np.float64), features["loss_without"] - features["loss"].astype(np.float64)
    # not mode="same", whose result is as long as the longer argument: five for an answer of fewer tokens
    window = np.convolve(gain, np.ones(5) / 5)[2 : 2 + len(gain)]
    found = np.zeros((num, len(SURPRISE)))
    for i in range(num):
        here = part == i
        if not here.any():
            continue
        mine, new = gain[here], here & novel
        found[i] = [
            loss[here].mean(), features["entropy"][here].mean(), mine.mean(), features["loss_without"][here].mean(),
            (features["entropy_without"] - features["entropy"])[here].mean(), window[here].min(),
            np.mean(mine < 0.1), loss[here].max(), gain[new].mean() if new.any() else mine.mean(),
            loss[new].mean() if new.any() else loss[here].mean(),
        ]  # fmt: skip
    return found
