"""Sentences of a response and passages of a context, as characters of the text (S file)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

# A sentence ends after its mark and a space, after a mark of scripts without spaces, or at the end of a line. A run of
# marks is looked at once, from its first: dots as leaders would else take time by the square of their number.
END = re.compile(r"(?<![.!?؟।])[.!?؟।]++[\"'”’)\]]*+(?=\s)|[。！？｡]+[」』”’）)\]]*|\n+")
ABBREVIATION_REACH = 12  # characters before an end that it is looked for in; a line's number has fewer digits
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Sr|Jr|Prof|Gen|Sen|Rep|Gov|Lt|Col|vs|etc|approx|No|Inc|Ltd|Co|Corp|Ave|Blvd|Rd|Ste|a\.m|p\.m|"
    r"e\.g|i\.e|U\.S|U\.K)|\b[A-Z]|(?:^|\n)\s*\d{1,9})\.$"
)


def sentences(text: str) -> list[tuple[int, int]]:
    """Start and end of each sentence, without the space around it; together they contain every letter of the text."""
    found, start = [], 0
    for match in [*END.finditer(text), None]:
        end = len(text) if match is None else match.end()
        is_line_end = match is None or match.group()[0] == "\n"
        if not is_line_end and ABBREVIATION.search(text[max(start, end - ABBREVIATION_REACH) : end]):
            continue
        part = text[start:end]
        if any(letter.isalnum() for letter in part):
            found.append((start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())))
            start = end
        elif match is None and found and part.strip():  # only punctuation: it belongs to the sentence before
            found[-1] = (found[-1][0], end - len(part) + len(part.rstrip()))
    return found


def tokens_of(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """Index of the span [tokens] that holds each token's last character, or the one before; offsets: [R 2].

    The last character: many tokenizers give a token the space before its word, and " I" belongs to the sentence that it
    begins.
    """
    starts = np.array([start for start, _ in spans])
    last = np.maximum(offsets[:, 1], offsets[:, 0] + 1) - 1
    return np.maximum(np.searchsorted(starts, last, side="right") - 1, 0)
