"""Identify which of several schemes and keys marked a text, if any, and which payload it carries (S file).

Axis letters: N texts, K candidates, M payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.measure.verdicts import holm
from jaxbench.result_cache import ResultCache
from jaxbench.watermark import detection, score_cache, significance
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.texts import Ragged

CORRECTIONS = {"bonferroni": significance.bonferroni, "holm": holm}


class Candidate(NamedTuple):
    """One scheme under one key, with the name used in results."""

    name: str
    scheme: Scheme
    key: Key
    green_lists: Any = None


class Identification(NamedTuple):
    """Answers for N texts and K candidates."""

    names: tuple[str, ...]
    p_values: np.ndarray  # float64 [N K], of each candidate alone, over all payloads that it can carry
    corrected: np.ndarray  # float64 [N K], over the family of K
    best: np.ndarray  # int64 [N], the candidate with the smallest p-value
    p_value: np.ndarray  # float64 [N], the corrected p-value of `best`: that of `any of them`
    payloads: np.ndarray  # int64 [N K], the likeliest message under each candidate; -1 where it carries none
    num_known: int  # how many of the N times K scores were not computed (cached or duplicates)


def identify(
    candidates: Sequence[Candidate],
    ids: Ragged,
    *,
    vocab_size: int,
    make_detector: Callable[..., detection.NumpyDetector],
    correction: str = "holm",
    prompt_lengths: np.ndarray | int | None = None,
    cache: ResultCache | None = None,
) -> Identification:
    """Test every text against every candidate.

    Args:
      make_detector: detect.Detector of a backend, called as make_detector(scheme, vocab_size=..., green_lists=...).
      correction: bonferroni or holm; both control the family-wise error rate under any dependence of the candidates.
      cache: of scores, see score_cache.py; None = every text is scored.

    Raises:
      ValueError: no candidates, two with the same name, or an unknown correction.
    """
    names = tuple(candidate.name for candidate in candidates)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"identify: candidates {names}, wanted at least one and no name twice")
    if correction not in CORRECTIONS:
        raise ValueError(f"identify: correction={correction!r} is unknown, wanted one of {', '.join(CORRECTIONS)}")
    found, payloads = np.empty((len(ids), len(names))), np.empty((len(ids), len(names)), np.int64)
    num_known = 0
    for column, candidate in enumerate(candidates):
        detector = make_detector(candidate.scheme, vocab_size=vocab_size, green_lists=candidate.green_lists)
        one, known = score_cache.detect(detector, ids, candidate.key, cache, prompt_lengths=prompt_lengths)
        num_known += known
        found[:, column], payloads[:, column] = one.p_value, one.payload
    corrected = CORRECTIONS[correction](found)
    best = found.argmin(axis=1)
    p_value = np.take_along_axis(corrected, best[:, None], axis=1)[:, 0]
    return Identification(names, found, corrected, best, p_value, payloads, num_known)
