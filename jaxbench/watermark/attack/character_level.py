"""Edits of characters: typos, case, look-alikes, invisible characters, emoji (S file)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxbench.watermark.attack.random_draws import Draws, replace_matches

KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # each row starts half a key further right than the one above
# Latin letters and their Cyrillic or Greek look-alikes; Unicode Technical Standard 39, confusables.txt
HOMOGLYPHS = {
    "a": "\u0430", "c": "\u0441", "e": "\u0435", "i": "\u0456", "j": "\u0458", "o": "\u043e", "p": "\u0440",
    "s": "\u0455", "x": "\u0445", "y": "\u0443", "A": "\u0410", "B": "\u0412", "C": "\u0421", "E": "\u0415",
    "H": "\u041d", "I": "\u0406", "J": "\u0408", "K": "\u039a", "M": "\u041c", "N": "\u039d", "O": "\u041e",
    "P": "\u0420", "S": "\u0405", "T": "\u0422", "X": "\u0425", "Y": "\u03a5", "Z": "\u0396",
}  # fmt: skip
ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"  # space, non-joiner, joiner, word joiner, no-break space
EMOJI = "\U0001f600\U0001f44d\u2728\U0001f389\U0001f525\U0001f680\U0001f4a1\U0001f60e\U0001f914\u2705"


def neighbours() -> dict[str, str]:
    """Return the keys next to each letter's key on a QWERTY keyboard."""
    found: dict[str, str] = {}
    places = {key: (x + y / 2, y) for y, row in enumerate(KEY_ROWS) for x, key in enumerate(row)}
    for key, (x, y) in places.items():
        found[key] = "".join(
            other for other, (u, v) in places.items() if other != key and abs(x - u) <= 1 and abs(y - v) <= 1
        )
    return found


NEIGHBOURS = neighbours()


def typo(text: str, strength: float, draws: Draws) -> str:
    """Make one typing error in each word of three letters or more, with probability `strength`.

    The error is one of: a neighbouring key instead of the right one, a letter omitted, doubled, or swapped with the
    next.
    """
    return replace_matches(r"[A-Za-z]{3,}", text, strength, draws, _slip, num_picks=3)


def _slip(word: str, kind: float, place: float, pick: float) -> str:
    kind, i = int(kind * 4), int(place * len(word))
    if kind == 0:
        near = NEIGHBOURS[word[i].lower()]
        key = near[int(pick * len(near))]
        return word[:i] + (key.upper() if word[i].isupper() else key) + word[i + 1 :]
    if kind == 1:
        return word[:i] + word[i + 1 :]
    if kind == 2:
        return word[: i + 1] + word[i:]
    i = min(i, len(word) - 2)
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def case(text: str, strength: float, draws: Draws) -> str:
    """Change the case of each word with probability `strength`: to one of lower, upper or swapped that differs."""

    def changed(word: str, pick: float) -> str:
        forms = [form for form in dict.fromkeys((word.lower(), word.upper(), word.swapcase())) if form != word]
        return forms[int(pick * len(forms))] if forms else word

    return replace_matches(r"[^\W\d_]+", text, strength, draws, changed)


def homoglyph(text: str, strength: float, draws: Draws) -> str:
    """Replace each letter that has a look-alike by that look-alike with probability `strength`."""
    chosen = draws.uniform(len(text)) < strength
    return "".join(HOMOGLYPHS.get(letter, letter) if is_chosen else letter for letter, is_chosen in zip(text, chosen))


def zero_width(text: str, strength: float, draws: Draws) -> str:
    """Put an invisible character after each character with probability `strength`."""
    return _put_after(text, draws.uniform(len(text)) < strength, draws, ZERO_WIDTH, "")


def emoji(text: str, strength: float, draws: Draws) -> str:
    """Put an emoji after each word with probability `strength`."""
    is_end = np.array([not one.isspace() and (not two or two.isspace()) for one, two in zip(text, [*text[1:], ""])])
    return _put_after(text, (draws.uniform(len(text)) < strength) & is_end, draws, EMOJI, " ")


def _put_after(text: str, chosen: np.ndarray, draws: Draws, signs: str, space: str) -> str:
    picks = draws.integers(len(text), len(signs))
    return "".join(
        letter + space + signs[pick] if is_chosen else letter for letter, is_chosen, pick in zip(text, chosen, picks)
    )


EDITS: dict[str, Callable[[str, float, Draws], str]] = {
    "typo": typo,
    "case": case,
    "homoglyph": homoglyph,
    "zero_width": zero_width,
    "emoji": emoji,
}
