"""Guesses of the next tokens from the text itself: what followed its last tokens where they occurred before (S file).

Source: Saxena 2023, prompt lookup decoding. A guess is computed in the same step as the token before it, and kept as
far as it equals what would have been drawn, so that an answer does not depend on guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NGRAM = 3  # last tokens that are looked up
START = 0.5  # assumed share of right guesses for a new text
HOT, HOT_START = 0.7, 0.3  # from this temperature on: a lower share, so that one bad guess makes it pause
LEAST_SHARE = 0.25  # of guessed tokens that must be right on average, or guesses pause
PAUSE = 32  # tokens without guesses after a share below that; doubled each time
MEMORY = 0.8  # decay of the average, per guess


class Lookup:
    """One text's index, and how good its guesses were."""

    def __init__(self, temperature: float = 0.0) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # last tokens -> latest position of the token after them
        self._indexed = NGRAM
        self._share, self._pause, self._pause_until = START if temperature < HOT else HOT_START, PAUSE, 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Guess next tokens: the share of `most` that has been right; () if the last ones are new, or in a pause.

        A wrong guess costs all requests in the step: with 8 clients whose answers are sampled, guesses of full length
        cost 4 to 7 % of all tokens a second.
        """
        for place in range(self._indexed, len(tokens)):
            self._behind[tuple(tokens[place - NGRAM : place])] = place
        self._indexed = max(self._indexed, len(tokens))
        if not self.may_guess(len(tokens)) or len(tokens) < NGRAM or most < 1:
            return ()
        place = self._behind.get(tuple(tokens[-NGRAM:]))
        return () if place is None else tuple(tokens[place : place + math.ceil(self._share * most)])

    def may_guess(self, length: int) -> bool:
        """Return False while guesses are paused; length: of the text."""
        return length >= self._pause_until

    def record(self, num_guessed: int, num_right: int, length: int) -> None:
        """Record how many tokens of a guess were right; length: of the text now."""
        self._share = MEMORY * self._share + (1.0 - MEMORY) * num_right / num_guessed
        if self._share < LEAST_SHARE:
            self._share, self._pause_until = LEAST_SHARE, length + self._pause
            self._pause *= 2
