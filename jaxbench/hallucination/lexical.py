"""Lexical evidence: words, numbers and names of a response that its context does not have (S file).

No model is used. These counts are the baseline that every reader is measured against: on RAGTruth they beat published
detectors (docs/hallucination.md).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import NamedTuple

import numpy as np

# Function words, and words with which a generator refers to the text.
STOP_WORDS = frozenset(
    """a about above after again against all also although am an and any are as at be because been before being below
    between both but by can could did do does doing down during each few for from further had has have having he her
    here hers him his how however i if in into is it its itself just like may me might more most must my no nor not now
    of off on once only or other our out over own same she should so some such than that the their them then there
    these they this those through to too under until up us very was we were what when where which while who whom why
    will with within without would you your yours according additionally based context furthermore given information
    mentioned overall passage passages provided""".split()
)
SUFFIXES = ("ingly", "edly", "ings", "ness", "ing", "ies", "ied", "est", "ers", "ed", "es", "ly", "er", "s")
COUNTS = (
    "words", "novel_words", "novel_share", "novel_numbers", "novel_names", "novel_pairs", "pair_share",
)  # fmt: skip


class Token(NamedTuple):
    """A word or number of a text."""

    start: int  # characters
    end: int
    key: str  # the stem, which forms of a word have in common
    is_number: bool
    is_name: bool  # capitalised, and not the first word of a sentence
    is_content: bool  # not a stop word


class Lexicon:
    """The words, pairs of content words and numbers of a context."""

    def __init__(self, context: str):
        found = tokens(context)
        self.words = {token.key for token in found}
        content = [token.key for token in found if token.is_content]
        self.pairs = set(zip(content, content[1:]))
        self.digits = set(re.findall(r"\d+", context))


@functools.cache
def _word() -> re.Pattern[str]:
    """Compile the pattern of a word: letters and digits with their combining marks, and apostrophes between them."""
    # 7 ms, once: `re` has no class for Unicode marks. Those above U+FFFF are of rarely written scripts.
    marks = "".join(letter for letter in map(chr, range(0x10000)) if unicodedata.category(letter)[0] == "M")
    run = rf"[^\W_]+(?:[{marks}]+[^\W_]*)*"
    return re.compile(rf"{run}(?:['’]{run})*")


def stem(word: str) -> str:
    """Remove a word's ending if at least four letters are left."""
    word = word.lower().replace("’", "'").removesuffix("'s")
    for suffix in SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 4:
            return word[: -len(suffix)]
    return word


def tokens(text: str) -> list[Token]:
    """Return the words and numbers of a text; the two Unicode forms of a word (NFC, NFD) have the same key."""
    found, last_end = [], 0
    for match in _word().finditer(text):
        word, between = unicodedata.normalize("NFC", match.group()), text[last_end : match.start()]
        is_first = not last_end or any(mark in between for mark in '.!?:\n"“')
        is_number = any(letter.isdecimal() for letter in word)  # what \d matches: no ² or ₂
        key = stem(word)
        found.append(
            Token(
                match.start(), match.end(), key, is_number,
                not is_number and not is_first and word[0].isupper() and word.lower() not in STOP_WORDS,
                word.lower() not in STOP_WORDS,
            )
        )  # fmt: skip
        last_end = match.end()
    return found


def is_novel(token: Token, lexicon: Lexicon) -> bool:
    """True if a context lacks the word or, for a number, at least one of its runs of digits."""
    if token.is_number:
        return not set(re.findall(r"\d+", token.key)) <= lexicon.digits
    return token.key not in lexicon.words


def counts(response: list[Token], lexicon: Lexicon) -> np.ndarray:
    """Compute the seven COUNTS of a whole response or of a part."""
    content = [token for token in response if token.is_content]
    novel = [token for token in content if is_novel(token, lexicon)]
    pairs = list(zip(content, content[1:]))
    new_pairs = sum((left.key, right.key) not in lexicon.pairs for left, right in pairs)
    return np.array(
        [
            len(response), len(novel), len(novel) / max(len(content), 1), sum(token.is_number for token in novel),
            sum(token.is_name for token in novel), new_pairs, new_pairs / max(len(pairs), 1),
        ],
        np.float64,
    )  # fmt: skip
