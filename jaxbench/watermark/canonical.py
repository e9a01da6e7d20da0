"""Undo changes of a text's tokens that keep its look: homoglyphs, invisible characters, styled letters (S file).

This runs before the tokenizer in detection. What models write stays: letters of other scripts in words of that script,
joiners in emoji and in scripts that need them, accents, typographic quotes and dashes.
"""

from __future__ import annotations

import functools
import operator
import re
import unicodedata
from typing import NamedTuple

# Always removed: soft hyphen, grapheme joiner, zero-width space, bidirectional controls, word joiner and invisible
# operators, byte order mark, interlinear marks, tags.
INVISIBLE = (
    "\u00ad\u034f\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
# Removed after Latin text and typographic punctuation only: other scripts and emoji need them.
JOINERS = "\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef"
PUNCTUATION = "\u2010-\u2027\u2030-\u203b\u203d-\u2048\u204a-\u205e"  # except the two that are emoji
SPACES = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
STYLED = "\uff01-\uff5e\U0001d400-\U0001d7ff"  # full-width forms, mathematical letters and digits
LATIN_END = 0x250  # code points below are Latin, digits and punctuation
LATIN_SHARE = 0.6  # of a text's letters: from here on, a word of only look-alikes counts as Latin

_invisible = re.compile(f"[{INVISIBLE}]")
_joiners = re.compile(f"[{JOINERS}]+")
_spaces = re.compile(f"[{SPACES}]")
_styled = re.compile(f"[{STYLED}]+")
_punctuation = re.compile(f"[{PUNCTUATION}]")
_not_ascii = re.compile("[^\\x00-\\x7f]")
_word = re.compile(r"[^\W\d_]+")


class Canonical(NamedTuple):
    """A canonical text, and how many characters were changed to get there."""

    text: str
    homoglyphs: int  # letters of other scripts replaced by the Latin letter they look like
    invisible: int  # zero-width characters and direction controls removed
    compatibility: int  # full-width and mathematical letters and unusual spaces replaced

    @property
    def num_changed(self) -> int:
        """Number of characters that were replaced or removed."""
        return self.homoglyphs + self.invisible + self.compatibility


def canonicalize(text: str) -> Canonical:
    """Return the canonical form of a text; idempotent.

    Source of the look-alikes: Unicode Technical Standard 39, confusables.txt, as packaged in `confusable-homoglyphs`.
    """
    if text.isascii() or _suspicious().isdisjoint(_not_ascii.findall(text)):
        return Canonical(text, 0, 0, 0)
    spaced, spaces = _spaces.subn(" ", _invisible.sub("", text))
    styled = sum(len(letters) for letters in _styled.findall(spaced))
    unstyled = _styled.sub(lambda match: unicodedata.normalize("NFKC", match.group()), spaced)
    plain = _joiners.sub(_kept_joiners, unstyled)  # after unstyling: joiners behind styled letters go too
    latin = _latinize(plain)
    return Canonical(latin, sum(map(operator.ne, plain, latin)), len(text) - len(plain), spaces + styled)


@functools.cache
def look_alikes() -> dict[str, str]:
    """Map letters of other scripts to the ASCII letters that they look like."""
    from confusable_homoglyphs import confusables

    ascii_of = {}
    for letter, others in confusables.confusables_data.items():
        if len(letter) != 1 or not letter.isalpha() or unicodedata.name(letter, "LATIN").startswith("LATIN"):
            continue
        ascii_letters = [c for c in (other["c"] for other in others) if len(c) == 1 and c.isascii() and c.isalpha()]
        if ascii_letters and not re.match(f"[{STYLED}]", letter):
            # confusables.txt gives small l for every capital I
            ascii_of[letter] = "I" if ascii_letters[0] == "l" and letter.isupper() else ascii_letters[0]
    return ascii_of


@functools.cache
def _suspicious() -> frozenset[str]:
    """Return every character that canonicalisation may change."""
    ranges = re.findall("(.)-(.)|(.)", INVISIBLE + JOINERS + SPACES + STYLED, re.DOTALL)
    letters = (
        chr(code) for first, last, single in ranges for code in range(ord(first or single), ord(last or single) + 1)
    )
    return frozenset(letters) | frozenset(look_alikes())


def _kept_joiners(match: re.Match[str]) -> str:
    before = match.string[match.start() - 1] if match.start() else "a"
    is_latin = ord(before) < LATIN_END or before in look_alikes() or _punctuation.match(before)
    return "" if is_latin else match.group()


def _latinize(text: str) -> str:
    """Replace look-alikes in words that are meant as Latin; the text keeps its length."""
    table = look_alikes()

    def replaced(word: str) -> str:
        return "".join(table.get(letter, letter) for letter in word)

    def mixed(match: re.Match[str]) -> str:
        word = match.group()
        return replaced(word) if any(ord(letter) < LATIN_END for letter in word) else word

    def whole(match: re.Match[str]) -> str:
        word = match.group()
        # a single Greek capital that looks Latin is an initial, not a symbol
        is_symbol = len(word) == 1 and word.islower() and unicodedata.name(word).startswith("GREEK")
        return replaced(word) if all(letter in table for letter in word) and not is_symbol else word

    # Mixed words first: then their letters count as Latin below, however many were replaced.
    text = _word.sub(mixed, text)
    letters = [letter for letter in text if letter.isalpha()]
    is_latin = sum(ord(letter) < LATIN_END for letter in letters) >= LATIN_SHARE * len(letters)
    return _word.sub(whole, text) if is_latin else text
