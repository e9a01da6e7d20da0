"""Which of several schemes and keys marked a text, if any; and which payload it carries (S file).

Axis letters: N texts, K candidates, M payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import pipeline, statistics
from jaxbench.watermark.config import num_payloads
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

CORRECTIONS = {"bonferroni": statistics.bonferroni, "holm": statistics.holm}


class Candidate(NamedTuple):
    """One scheme under one key, with the name that the answer gives."""

    name: str
    scheme: Any
    key: Key
    tables: Any = None


class Identification(NamedTuple):
    """Answers for N texts and K candidates."""

    names: tuple[str, ...]
    p_values: np.ndarray  # float64 [N K], of each candidate alone
    corrected: np.ndarray  # float64 [N K], over the family of K
    best: np.ndarray  # int64 [N], the candidate with the smallest p-value
    p_value: np.ndarray  # float64 [N], its corrected p-value: that of `any of them`

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
    make_detector: Callable[..., pipeline.Evidencer],
    correction: str = "holm",
    prompt_lengths: np.ndarray | int | None = None,
) -> Identification:
    """Test every text against every candidate.

    Args:
      make_detector: detect.Detector of a backend, called as make_detector(scheme, vocab_size=..., tables=...).
      correction: bonferroni or holm; both hold the family-wise error rate, under any dependence of the candidates.

    Raises:
      ValueError: no candidates, two of one name, or an unknown correction.
    """
    names = tuple(candidate.name for candidate in candidates)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"identify: candidates {names}, wanted at least one and no name twice")
    if correction not in CORRECTIONS:
        raise ValueError(f"identify: correction={correction!r} is unknown, wanted one of {', '.join(CORRECTIONS)}")
    found = np.empty((len(ids), len(names)))
    for column, candidate in enumerate(candidates):
        detector = make_detector(candidate.scheme, vocab_size=vocab_size, tables=candidate.tables)
        if num_payloads(candidate.scheme) > 1:
            found[:, column] = decode_payload(detector, ids, candidate.key, prompt_lengths=prompt_lengths).p_value
        else:
            found[:, column] = pipeline.detect(detector, ids, candidate.key, prompt_lengths=prompt_lengths).p_value
    corrected = CORRECTIONS[correction](found)
    best = found.argmin(axis=1)
    return Identification(names, found, corrected, best, np.take_along_axis(corrected, best[:, None], axis=1)[:, 0])


def decode_payload(
    detector: pipeline.Evidencer,
    ids: Ragged,
    key: Key,
    *,
    prompt_lengths: np.ndarray | int | None = None,
) -> Payloads:
    """Return the payload of each text among the 2**payload_bits cyclic shifts, with a p-value for having looked at all.

    Raises:
      ValueError: the scheme carries no payload, or more payloads than tokens.
    """
    number = num_payloads(detector.scheme)
    if number < 2 or number > detector.vocab_size:
        raise ValueError(
            f"decode_payload: scheme {detector.scheme.scheme} has {number} payloads and a vocabulary of "
            f"{detector.vocab_size}, wanted payload_bits of at least 1 and no more payloads than tokens"
        )
    prompt = np.broadcast_to(np.asarray(0 if prompt_lengths is None else prompt_lengths, np.int32), len(ids))
    best, payload = np.full(len(ids), np.inf), np.zeros(len(ids), np.int64)
    scored = np.zeros(len(ids), np.int64)
    for rows, tokens, lengths in pipeline.batches(ids):
        # all payloads of few texts, or few payloads of many texts, fill one call
        together = max(1, min(number, pipeline.BATCH_TOKENS // max(1, tokens.size)))
        for start in range(0, number, together):
            shifts = np.arange(start, min(number, start + together))
            tiled = (np.tile(tokens, (len(shifts), 1)), np.tile(lengths, len(shifts)))
            evidence = detector.evidence(
                *tiled, key, prompt_lengths=np.tile(prompt[rows], len(shifts)), payload=np.repeat(shifts, len(rows))
            )
            found = statistics.score(detector.scheme, evidence, vocab_size=detector.vocab_size)
            p_values = found.p_value.reshape(len(shifts), len(rows))
            at = p_values.argmin(axis=0)
            least = np.take_along_axis(p_values, at[None], axis=0)[0]
            better = least < best[rows]
            best[rows] = np.where(better, least, best[rows])
            payload[rows] = np.where(better, shifts[at], payload[rows])
            scored[rows] = found.num_scored[: len(rows)]
    return Payloads(payload, statistics.any_of(np.minimum(best, 1.0), number), scored)
