"""Which of several schemes and keys marked a text, if any; and which payload it carries (S file).

Axis letters: N texts, K candidates, M payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import detection, statistics
from jaxbench.watermark.config import num_payloads
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

CORRECTIONS = {"bonferroni": statistics.bonferroni, "holm": statistics.holm}


class Candidate(NamedTuple):
    """One scheme under one key, with the name that the answer gives."""

    name: str
    scheme: Any
    key: Key
    green_lists: Any = None


class Identification(NamedTuple):
    """Answers for N texts and K candidates."""

    names: tuple[str, ...]
    p_values: np.ndarray  # float64 [N K], of each candidate alone, over all payloads that it can carry
    corrected: np.ndarray  # float64 [N K], over the family of K
    best: np.ndarray  # int64 [N], the candidate with the smallest p-value
    p_value: np.ndarray  # float64 [N], its corrected p-value: that of `any of them`
    payloads: np.ndarray  # int64 [N K], the likeliest message under each candidate; -1 where it carries none

    def accepted(self, level: float) -> np.ndarray:
        """Return the candidates found at a family-wise error rate, bool [N K]."""
        return self.corrected <= level


class Payloads(NamedTuple):
    """The message of each text [N]."""

    payload: np.ndarray  # int64, the payload with the smallest p-value
    p_value: np.ndarray  # float64, 1 - (1 - p)^M: of `some payload is there`
    num_scored: np.ndarray  # int64


def identify(
    candidates: Sequence[Candidate],
    ids: Ragged,
    *,
    vocab_size: int,
    make_detector: Callable[..., detection.Evidencer],
    correction: str = "holm",
    prompt_lengths: np.ndarray | int | None = None,
) -> Identification:
    """Test every text against every candidate.

    Args:
      make_detector: detect.Detector of a backend, called as make_detector(scheme, vocab_size=..., green_lists=...).
      correction: bonferroni or holm; both hold the family-wise error rate, under any dependence of the candidates.

    Raises:
      ValueError: no candidates, two of one name, or an unknown correction.
    """
    names = tuple(candidate.name for candidate in candidates)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"identify: candidates {names}, wanted at least one and no name twice")
    if correction not in CORRECTIONS:
        raise ValueError(f"identify: correction={correction!r} is unknown, wanted one of {', '.join(CORRECTIONS)}")
    found, payloads = np.empty((len(ids), len(names))), np.empty((len(ids), len(names)), np.int64)
    for column, candidate in enumerate(candidates):
        detector = make_detector(candidate.scheme, vocab_size=vocab_size, green_lists=candidate.green_lists)
        one = detection.detect(detector, ids, candidate.key, prompt_lengths=prompt_lengths)
        found[:, column], payloads[:, column] = one.p_value, one.payload
    corrected = CORRECTIONS[correction](found)
    best = found.argmin(axis=1)
    p_value = np.take_along_axis(corrected, best[:, None], axis=1)[:, 0]
    return Identification(names, found, corrected, best, p_value, payloads)


def decode_payload(
    detector: detection.Evidencer,
    ids: Ragged,
    key: Key,
    *,
    prompt_lengths: np.ndarray | int | None = None,
) -> Payloads:
    """Return the payload of each text among the 2**payload_bits cyclic shifts, with a p-value for having looked at all.

    Raises:
      ValueError: the scheme carries no payload.
    """
    number = num_payloads(detector.scheme)
    if number < 2:
        raise ValueError(
            f"decode_payload: scheme {detector.scheme.scheme} has {number} payloads, wanted payload_bits of at least 1"
        )
    found = detection.detect(detector, ids, key, prompt_lengths=prompt_lengths)
    return Payloads(found.payload, found.p_value, found.num_scored)
