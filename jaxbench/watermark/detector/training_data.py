"""Batches that train and test the neural detector (S file).

A text alone must not reveal its label: every marked text is also shown as an unmarked one, with the evidence of another
key, and so is human text. Under another key the words of distinct inputs are independent and uniform, so they are
drawn, not computed. What remains to learn is how much weight each token's evidence deserves, and where to look.

Training edits change the evidence: an edited token, and the tokens whose context includes it, get fresh words; pasted
human text has only fresh words. Test edits change the tokens, and their evidence is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import reference
from jaxbench.watermark.detector import features
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme


class Pool(NamedTuple):
    """Texts of one scheme; the words are those under each text's key, None for human text."""

    scheme: Scheme
    tokens: np.ndarray  # int32 [N T]
    scored: np.ndarray  # bool [N T]
    words: np.ndarray | None  # uint32 [N T]


class Example(NamedTuple):
    """How the examples of a batch are made."""

    min_tokens: int  # shortest beginning of a text that is shown
    max_edited: float  # largest share of tokens that are replaced, 0 <= share < 1
    pasted_share: float  # share of examples that are a passage inside human text


def marked_pool(scheme: Scheme, tokens: np.ndarray, keys: Sequence[Key], *, vocab_size: int) -> Pool:
    """Make a pool of texts [N T] that were generated with one key each."""
    evidence = reference.evidence(scheme, keys, tokens, vocab_size=vocab_size)
    return Pool(scheme, tokens, evidence.scored, evidence.words)


def human_pool(scheme: Scheme, tokens: np.ndarray, *, vocab_size: int, green_lists: Any = None) -> Pool:
    """Make a pool of human texts [N T], scored by one scheme."""
    evidence = reference.evidence(scheme, Key(0), tokens, vocab_size=vocab_size, green_lists=green_lists)
    return Pool(scheme, tokens, evidence.scored, None)


def null_arrays(
    pool: Pool, rows: np.ndarray, length: int, random: np.random.Generator, *, start: int = 0
) -> features.Arrays:
    """Return passages of a pool's texts, from token `start`, with evidence under unrelated keys."""
    tokens, scored = (field[rows, start : start + length] for field in (pool.tokens, pool.scored))
    words = pool.scheme.null_words(random, tokens.shape)
    value = features.evidence(pool.scheme, reference.Evidence(words, scored))
    return features.Arrays(tokens, value.astype(np.float32), scored, np.zeros(len(rows), np.float32))


def batch(
    marked: Sequence[Pool], human: Sequence[Pool], *, size: int, example: Example, random: np.random.Generator
) -> features.Arrays:
    """Draw a training batch: half marked texts, a quarter such texts under other keys, a quarter human text."""
    parts = [_example(marked[i % len(marked)], human, True, example, random) for i in range(size // 2)]
    parts += [_example(marked[i % len(marked)], human, False, example, random) for i in range(size // 4)]
    parts += [_example(human[i % len(human)], human, False, example, random) for i in range(size - len(parts))]
    return features.Arrays(*(np.stack(field) for field in zip(*parts, strict=True)))


def replaced(tokens: np.ndarray, share: float, pool: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Replace a share of the tokens of texts [N T] by tokens drawn from a pool of other texts."""
    is_edited = random.random(tokens.shape) < share
    return np.where(is_edited, random.choice(pool.ravel(), tokens.shape), tokens).astype(np.int32)


def pasted(tokens: np.ndarray, share: float, carriers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Paste the beginning of each marked text [N T] into a human text of the same length."""
    rows, length = tokens.shape
    count = max(1, round(share * length))
    out = carriers[random.integers(0, len(carriers), rows), :length].copy()
    for row, start in enumerate(random.integers(0, length - count + 1, rows)):
        out[row, start : start + count] = tokens[row, :count]
    return out


def _example(
    pool: Pool, human: Sequence[Pool], is_marked: bool, example: Example, random: np.random.Generator
) -> tuple:
    """Return the fields of Arrays for one text; tokens and lengths have the same distribution under both labels."""
    row, length = random.integers(len(pool.tokens)), pool.tokens.shape[1]
    is_kept = _unedited(pool.scheme, length, example, random)
    if random.random() < example.pasted_share:
        start, end = sorted(random.integers(0, length + 1, 2))
        is_kept &= (np.arange(length) >= start) & (np.arange(length) < max(end, start + example.min_tokens))
    carrier = human[random.integers(len(human))].tokens
    tokens = np.where(is_kept, pool.tokens[row], carrier[random.integers(len(carrier)), :length])
    words = pool.scheme.null_words(random, (length,))
    if is_marked:
        words = np.where(is_kept, pool.words[row], words)
    is_token = np.arange(length) < random.integers(example.min_tokens, length + 1)
    scored = pool.scored[row] & is_token
    value = features.evidence(pool.scheme, reference.Evidence(words, scored)).astype(np.float32)
    return np.where(is_token, tokens, -1).astype(np.int32), value, scored, np.float32(is_marked)


def _unedited(scheme: Scheme, length: int, example: Example, random: np.random.Generator) -> np.ndarray:
    """Return which tokens keep their evidence when a random share of the tokens is replaced, bool [T]."""
    is_edited = random.random(length) < random.uniform(0, example.max_edited) * (random.random() < 0.5)
    affected = is_edited.copy()
    for place in range(1, scheme.context_length + 1):
        affected[place:] |= is_edited[:-place]
    return ~affected
