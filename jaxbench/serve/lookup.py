"""Guesses of the next tokens from the text itself: what followed its last tokens when they stood there before (S file).

Source: Saxena 2023, prompt lookup decoding. A guess is computed beside the token before it and kept as far as it
is what would have been drawn, so that an answer does not depend on guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NGRAM = 3  # last tokens that are looked up
START = 0.5  # share of guessed tokens that a new text is believed to get right
HOT, HOT_START = 0.7, 0.3  # from this temperature on fewer are: one bad guess, and it pauses
LEAST_SHARE = 0.25  # of guessed tokens that have to be right, on average, for guesses to go on
PAUSE = 32  # tokens without a guess behind a share below that; twice as many the next time
MEMORY = 0.8  # of the average, a guess


class Lookup:
    """One text's index, and how good its guesses were."""

    def __init__(self, temperature: float = 0.0) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # last tokens -> where the token behind them was last
        self._indexed = NGRAM
        self._share, self._pause, self._pause_until = START if temperature < HOT else HOT_START, PAUSE, 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """The next tokens: of so many, the share that has been right; none where the last ones are new, or in a pause.

        A guess that is wrong is paid for by all who are in the step: beside 8 clients whose answers are drawn, guesses
        of full length cost 4 to 7 % of all tokens a second.
        """
        for place in range(self._indexed, len(tokens)):
            self._behind[tuple(tokens[place - NGRAM : place])] = place
        self._indexed = max(self._indexed, len(tokens))
        if not self.may_guess(len(tokens)) or len(tokens) < NGRAM or most < 1:
            return ()
        place = self._behind.get(tuple(tokens[-NGRAM:]))
        return () if place is None else tuple(tokens[place : place + math.ceil(self._share * most)])

    def may_guess(self, length: int) -> bool:
        """False while guesses pause; length: of the text."""
        return length >= self._pause_until

    def heard(self, num_guessed: int, num_right: int, length: int) -> None:
        """Take note of how many tokens of a guess were right; length: of the text now."""
        self._share = MEMORY * self._share + (1.0 - MEMORY) * num_right / num_guessed
        if self._share < LEAST_SHARE:
            self._share, self._pause_until = LEAST_SHARE, length + self._pause
            self._pause *= 2
