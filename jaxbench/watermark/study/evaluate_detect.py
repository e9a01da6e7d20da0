"""Detection as the evaluation uses it: texts under their own keys, at several lengths.

Axis letters: N texts, T tokens. No twin: it calls the detector of one backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import canonical, detect, keys, reference, statistics


class Found(NamedTuple):
    """What the detector says about N texts at each length, and in a last column about all of each text."""

    p_values: np.ndarray  # [N, lengths + 1], nan where a text is shorter than the length
    mid_p: np.ndarray  # likewise
    num_scored: np.ndarray  # likewise, 0 there


class Bench:
    """One scheme's detector over texts or token ids."""

    def __init__(self, scheme: Any, *, tokenizer: Any, vocab_size: int, canonicalize: bool = True):
        """Make the detector."""
        self.scheme, self.vocab_size = scheme, vocab_size
        self._tokenizer, self._canonicalize = tokenizer, canonicalize
        self._detector = detect.Detector(scheme, vocab_size=vocab_size)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids that the detector sees: canonical text, without special tokens."""
        if self._canonicalize:
            texts = [canonical.canonicalize(text).text for text in texts]
        return self._tokenizer.encode_batch(list(texts), add_special=False)

    def evidence(self, token_ids: Sequence[Sequence[int]], key: keys.Key | Sequence[keys.Key]) -> reference.Evidence:
        """Return the evidence of texts under one key, or each under its own."""
        tokens, lengths = pad(token_ids)
        return self._detector.evidence(tokens, lengths, key)

    def score(self, token_ids: Sequence[Sequence[int]], key: keys.Key | Sequence[keys.Key]) -> statistics.Detections:
        """Return scores and p-values of texts under one key, or each under its own."""
        return statistics.score(self.scheme, self.evidence(token_ids, key), vocab_size=self.vocab_size)

    def at_lengths(
        self,
        token_ids: Sequence[Sequence[int]],
        key: keys.Key | Sequence[keys.Key],
        lengths: Sequence[int],
        *,
        cut: int,
    ) -> Found:
        """Test the beginning of each text at each length, and in a last column all of it up to `cut` tokens.

        A position's evidence depends on what precedes it only, so that one pass serves every length.
        """
        sizes = np.array([len(ids) for ids in token_ids])
        found = np.full((3, len(token_ids), len(lengths) + 1), np.nan)
        found[2] = 0
        if len(sizes):
            longest = max([cut, *lengths])
            whole = self.evidence([ids[:longest] for ids in token_ids], key)
            for column, length in enumerate([*lengths, cut]):
                part = reference.Evidence(*(None if x is None else x[:, :length] for x in whole))
                result = statistics.score(self.scheme, part, vocab_size=self.vocab_size)
                kept = sizes >= (length if column < len(lengths) else 0)
                for values, new in zip(found, (result.p_value, result.mid_p, result.num_scored)):
                    values[kept, column] = new[kept]
        return Found(found[0], found[1], found[2].astype(np.int64))


def pad(token_ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids as one array [N T] int32, zeros after each text's end, and their lengths [N] int32."""
    lengths = np.array([len(ids) for ids in token_ids], np.int32)
    tokens = np.zeros((len(token_ids), max(1, int(lengths.max(initial=1)))), np.int32)
    for row, ids in enumerate(token_ids):
        tokens[row, : len(ids)] = ids
    return tokens, lengths
