"""Text of a row while its tokens arrive: which part is final, and where a stop string ends it (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxbench.pretrained.tokenizer import BYTE_PIECE


class Text:
    """One row's text.

    A text ends before the stop string that is complete first (of several at one letter, the one that begins first), or
    at a special token that is a stop string. Where it ends thus depends neither on how many tokens arrive per step nor
    on other rows.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, prompt: Sequence[int] = ()):
        """Begin a text.

        prompt: ids that the text continues; () = it stands alone, as a chat's answer does. SentencePiece's decoders
        drop the space before a text's first word, which a continuation has to keep.
        """
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._stop_ids = frozenset(id for word in stop if (id := self._special_id(word)) is not None)
        self.ids: list[int] = []  # with the end token, and no further than the stop string
        self.text = ""  # the final part
        self.ended: str | None = None  # end: an end token | stop: a stop string | length | None: not ended
        core = getattr(tokenizer, "core", None)
        self._has_bytes = core is not None and core.token_to_id("<0x00>") is not None
        self._anchor, self._anchor_text = self._last_of(prompt)  # decoded before all other ids
        self._known, self._start, self._end = "", 0, 0  # text of ids up to _end; those from _start on precede new ones

    def update(self, ids: Sequence[int], *, is_full: bool) -> str:
        """Take all ids so far, and return the text that became final.

        is_full: there is no room for more ids.
        """
        if self.ended:
            return ""
        self.ids, shown = list(ids), len(self.text)
        has_end = bool(self.ids) and self.ids[-1] in self._tokenizer.end_ids
        ids = self.ids[:-1] if has_end else self.ids
        stop_at = next((i for i, id in enumerate(ids) if id in self._stop_ids), None) if self._stop_ids else None
        ids = ids[:stop_at]
        is_whole = has_end or is_full or stop_at is not None
        text = self._decode(ids) if is_whole else self._certain(ids)
        place = first_stop(text, self._stop)
        if place is not None:
            self.text, self.ended, self.ids = text[:place], "stop", self._up_to_stop(ids)
        elif stop_at is not None:
            self.text, self.ended, self.ids = text, "stop", self.ids[: stop_at + 1]
        elif is_whole:
            self.text, self.ended = text, "end" if has_end else "length"
        else:
            self.text = text[: len(text) - held_back(text, self._stop)]
        return self.text[shown:]

    @property
    def goes_on(self) -> bool:
        """True if the text continues a prompt's, False if it stands alone."""
        return bool(self._anchor)

    def _special_id(self, word: str) -> int | None:
        """Id of the special token that a stop string names: no text shows it, so it is known by its id alone."""
        core = getattr(self._tokenizer, "core", None)
        id = None if core is None else core.token_to_id(word)
        if id is None or self._tokenizer.decode([id], skip_special=True):
            return None
        return id if self._tokenizer.decode([id]) == word else None  # SentencePiece's space has no text alone either

    def _last_of(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Last id of a prompt that decodes to text without its neighbours, and that text; none: [] and ""."""
        for id in reversed(prompt):
            text = self._tokenizer.decode([id], skip_special=True)
            if text and "\ufffd" not in text and not self._is_byte(id):
                return [id], text
        return [], ""

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode([*self._anchor, *ids], skip_special=True)
        return text[len(self._anchor_text) :]

    def _is_byte(self, id: int) -> bool:
        return self._has_bytes and bool(BYTE_PIECE.fullmatch(self._tokenizer.core.id_to_token(id) or ""))

    def _certain(self, ids: Sequence[int]) -> str:
        """Text of ids without trailing characters that the next id may still change: those with incomplete bytes."""
        count = len(ids)
        # SentencePiece reads a run of bytes as a whole: one bad byte at its end makes all of them unreadable.
        while self._has_bytes and count and self._may_be_in_a_run(int(ids[count - 1])):
            count -= 1
        if count < self._end:
            return self._decode(ids[:count]).rstrip("\ufffd")
        # Only the last ids are decoded, after some earlier ones, which get what a decoder does at a text's beginning.
        before, text = self._decode(ids[self._start : self._end]), self._decode(ids[self._start : count])
        new = text[len(before) :]
        whole = self._known + new
        if new and not new.endswith("\ufffd"):
            self._known, self._start, self._end = whole, self._end, count
        return whole.rstrip("\ufffd")

    def _may_be_in_a_run(self, id: int) -> bool:
        """True for a byte, and for an id without text, which may be between two."""
        return self._is_byte(id) or not self._decode([id])

    def _up_to_stop(self, ids: list[int]) -> list[int]:
        """Shortest prefix of ids whose text holds a stop string."""
        least, most = 0, len(ids)
        while least < most:
            middle = (least + most) // 2
            found = first_stop(self._certain(ids[:middle]), self._stop) is not None
            least, most = (least, middle) if found else (middle + 1, most)
        return ids[:least]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Start of the stop string that is complete first, the longest of several; None = there is none."""
    places = [(place + len(word), place) for word in stop if (place := text.find(word)) >= 0]
    return min(places)[1] if places else None


def held_back(text: str, stop: Sequence[str]) -> int:
    """Number of last characters that may be the beginning of a stop string."""
    longest = min(max((len(word) - 1 for word in stop), default=0), len(text))
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in stop)), 0)
