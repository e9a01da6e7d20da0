"""Reasoning in answers: a model's tags around it, learned from its template, and its parting from the content (S file).

Qwen 3, DeepSeek R1 and others write <think>, what they consider, and </think> in front of an answer. Some templates end
a prompt with the opening tag, so that an answer begins with its reasoning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxbench.generation.pieces import held_back
from jaxbench.serve import constraint, tools

_ASKED = {"role": "user", "content": "What is there?"}
_REASONING, _CONTENT = "~because~", "~so~"
_CLOSING = re.compile(r"\s*(?:<|\[)/(\w+)(?:>|\])")


class Tags(NamedTuple):
    """What stands around the reasoning."""

    opening: str
    closing: str

    def are_open(self, tokenizer: Any, prompt: Sequence[int]) -> bool:
        """True where a prompt ends with the opening tag: the answer begins inside its reasoning."""
        return _ends_with(tokenizer, prompt, self.opening)

    def of_grammar(self, tokenizer: Any, prompt: Sequence[int]) -> constraint.Reasoning | None:
        """Return how reasoning may be in front of an answer that follows a grammar; None = the prompt has ended it."""
        if _ends_with(tokenizer, prompt, self.closing):
            return None
        parts = [tools.parts(tokenizer, tag)[0] for tag in self]
        tokens = tuple(part if isinstance(part, int) else None for part in parts)
        return constraint.Reasoning(*self, self.are_open(tokenizer, prompt), tokens)


def _ends_with(tokenizer: Any, prompt: Sequence[int], tag: str) -> bool:
    return tokenizer.decode(prompt[-len(tag) - 4 :]).rstrip().endswith(tag)


_USUAL = Tags("<think>", "</think>")


@functools.lru_cache(maxsize=8)
def learned(tokenizer: Any) -> Tags | None:
    """Return the tags of a tokenizer's template; None = it has none, or they are not in the text of an answer.

    A template that shows reasoning of earlier answers tells its tags; others only name the usual closing tag, to cut
    the reasoning off.
    """
    answer = {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING}
    try:
        shown = tokenizer.chat([_ASKED, answer], add_generation_prompt=False)
    except Exception:  # a template is third-party code, and may raise anything
        return None
    front, _, behind = shown.partition(_REASONING)
    found = _USUAL if _USUAL.closing in (getattr(tokenizer, "chat_template", None) or "") else None
    if (closing := _CLOSING.match(behind)) is not None:
        written = closing.group().strip()
        opening = written.replace("/", "", 1)
        found = Tags(opening, written) if front.rstrip().endswith(opening) else found
    return found if found and all(_is_visible(tokenizer, tag) for tag in found) else None


def _is_visible(tokenizer: Any, tag: str) -> bool:
    """True where a tag stays in the text of an answer, from which special tokens are left out."""
    return tokenizer.decode(tokenizer.encode(tag, add_special=False), skip_special=True).strip() == tag


class Finder:
    """Parts the reasoning of one answer from its content while its text comes, without white space at either's seam."""

    def __init__(self, tags: Tags, *, is_begun: bool):
        """is_begun: the prompt ends with the opening tag."""
        self._tags, self._is_begun = tags, is_begun
        self._place = "front"  # front | reasoning | behind | content
        self._text, self._is_told = "", False  # what is not decided; whether some of the reasoning was told

    def update(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """Take further text; return the reasoning and the content that became certain; is_whole: no more text comes."""
        self._text += text
        if self._place == "front":
            self._begin(is_whole)
        reasoning = self._reasoning(is_whole) if self._place == "reasoning" else ""
        if self._place == "behind" and (rest := self._text.lstrip()):
            self._place, self._text = "content", rest
        if self._place != "content":
            return reasoning, ""
        content, self._text = self._text, ""
        return reasoning, content

    def _begin(self, is_whole: bool) -> None:
        """Find what an answer begins with; some models write the opening tag that the prompt ends with again."""
        front, opening = self._text.lstrip(), self._tags.opening
        if front.startswith(opening):
            self._place, self._text = "reasoning", front[len(opening) :]
        elif is_whole or not opening.startswith(front):
            self._place = "reasoning" if self._is_begun else "content"

    def _reasoning(self, is_whole: bool) -> str:
        """Return the reasoning that became certain."""
        closing = self._tags.closing
        found, tag, rest = self._text.partition(closing)
        if tag:
            self._place = "behind"
        elif not is_whole:
            kept = held_back(found, [closing])
            found, rest = found[: len(found) - kept], found[len(found) - kept :]
        told = found if self._is_told else found.lstrip()
        end = len(told.rstrip())
        self._is_told = self._is_told or bool(end)
        self._text = rest if tag or is_whole else told[end:] + rest
        return told[:end]
