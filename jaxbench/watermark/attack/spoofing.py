"""Attacks on the key itself: guessing it, and forging marked text from samples of it (S file).

Neither needs the key. A forger learns which n-grams a marked source favours and chains them, so that the detector finds
a mark in text that the key's owner never generated. Source: Jovanovic et al. 2024, "Watermark stealing in large
language models", arXiv:2402.19361, section 4; unlike the paper, no language model smooths the forged text. Under wide
contexts, whose n-grams occur once, the chains are copied passages (`longest_copy`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.watermark import keys
from jaxbench.watermark.attack.random_draws import Draws

PASSPHRASES = ("", "password", "secret", "key", "watermark", "test", "jaxbench", "changeme", "123456", "hello")
NUMBERS = (0, 1, 2, 7, 10, 42, 123, 1234, 12345, 123456789, 15485863, 2971215073, 0xDEADBEEF, 2**32 - 1, 2**64 - 1)


class Guess(NamedTuple):
    """One guessed key: its name, the smallest p over the texts, and that p corrected for all guesses and texts."""

    name: str
    p_value: float
    corrected_p: float


def guessed_keys() -> list[tuple[str, keys.Key]]:
    """Return (name, key) of keys that people choose: small and famous numbers, published defaults, weak passphrases."""
    found = [(f"number {value}", keys.Key(value)) for value in NUMBERS]
    return found + [(f"passphrase {text!r}", keys.Key.from_passphrase(text)) for text in PASSPHRASES if text]


def guess(
    p_values: Callable[[keys.Key], np.ndarray], guesses: Sequence[tuple[str, keys.Key]] | None = None
) -> list[Guess]:
    """Try keys on texts and return all guesses, the most significant first; a corrected p below 0.01 is a hit.

    p_values(key) returns the p-value of each text [N]. The correction is Bonferroni over guesses and texts.
    """
    guesses = guessed_keys() if guesses is None else guesses
    found = []
    for name, key in guesses:
        p = np.asarray(p_values(key), np.float64)
        least = float(p.min()) if p.size else 1.0
        found.append(Guess(name, least, min(1.0, least * len(guesses) * max(p.size, 1))))
    return sorted(found, key=lambda one: one.p_value)


class Learnt(NamedTuple):
    """A forger's knowledge: contexts of `width` tokens, and how much the marked source favours each next token."""

    width: int
    following: dict[tuple[int, ...], list[tuple[int, float]]]  # context -> (token, score), best first


def learn(marked: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], *, width: int) -> Learnt:
    """Compare n-gram counts of marked samples with plain text of the same kind.

    A token's score after a context is the log ratio of its smoothed frequencies in marked and in plain text, plus 0.1
    times the log of its count in marked text.

    Raises:
      ValueError: width below 1, or no marked sample is longer than it.
    """
    if width < 1:
        raise ValueError(f"learn: width={width}, wanted at least 1")
    (ours, totals_ours), (theirs, totals_theirs) = _count(marked, width), _count(plain, width)
    if not ours:
        raise ValueError(f"learn: none of {len(marked)} marked samples has more than {width} tokens")
    following: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for (*context, token), count in ours.items():
        place = tuple(context)
        in_plain = (theirs[*context, token] + 1) / (totals_theirs[place] + 2)
        score = math.log((count + 1) / (totals_ours[place] + 2) / in_plain)
        following.setdefault(place, []).append((token, score + 0.1 * math.log(count)))
    for options in following.values():
        options.sort(key=lambda option: (-option[1], option[0]))
    return Learnt(width, following)


def forge(learnt: Learnt, *, num_tokens: int, seed: int, index: int = 0) -> list[int]:
    """Chain learnt n-grams, each used at most once, to token ids, preferring those that the marked source favours.

    When a chain ends, another begins at a random context.
    """
    draws = Draws(seed, step=0, site="watermark/attack/forge", row=index)
    starts = sorted(learnt.following)
    picks = iter(draws.integers(num_tokens + 1, len(starts)))
    tokens, used = list(starts[int(next(picks))]), set()
    while len(tokens) < num_tokens:
        context = tuple(tokens[-learnt.width :])
        options = [token for token, _ in learnt.following.get(context, ()) if (context, token) not in used]
        if options:
            used.add((context, options[0]))
            tokens.append(options[0])
        else:
            tokens += starts[int(next(picks))]
    return tokens[:num_tokens]


def longest_copy(text: Sequence[int], samples: Sequence[Sequence[int]]) -> int:
    """Return the length in tokens of the longest passage of a text that one of the samples has too, 0 for none.

    A forger whose contexts occur once each copies: a long passage is the owner's own writing, and no forgery.
    """
    ids, longest = np.asarray(text, np.int64), 0
    for sample in samples:
        ending = np.zeros(len(ids) + 1, np.int64)  # length of the common passage that ends at each place of the text
        for token in sample:
            ending[1:] = np.where(ids == token, ending[:-1] + 1, 0)
            longest = max(longest, int(ending.max()))
    return longest


def _count(samples: Sequence[Sequence[int]], width: int) -> tuple[Counter, Counter]:
    """Count each context with its next token, and each context that has a next token."""
    grams: Counter = Counter()
    contexts: Counter = Counter()
    for ids in samples:
        ids = [int(token) for token in ids]
        grams.update(tuple(ids[i : i + width + 1]) for i in range(len(ids) - width))
        contexts.update(tuple(ids[i : i + width]) for i in range(len(ids) - width))
    return grams, contexts
