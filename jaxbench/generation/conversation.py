"""A conversation: alternating messages; the oldest are dropped if they no longer fit the model's context (S file)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxbench.generation import requests, writer


class Conversation:
    """Alternating turns of a user and the model."""

    def __init__(self, write: writer.Writer, tokenizer: Any, *, new_tokens: int, system: str | None = None):
        self._write, self._tokenizer, self._new_tokens = write, tokenizer, new_tokens
        self._system, self._turns = system, 0
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str, **how: Any) -> tuple[writer.Text, writer.Timing, int]:
        """Return the model's answer, its timing, and how many messages were dropped for it.

        Args:
          how: further arguments of Writer.__call__.

        Raises:
          ValueError: the text is empty, or does not fit the context even alone; the conversation is unchanged.
        """
        asked = {"role": "user", "content": requests.check_text(text, "the message")}
        messages, forgotten = [*self.messages, asked], 0
        while True:
            ids = requests.message_ids(self._tokenizer, messages, "the message", self._system)
            if len(ids) + self._new_tokens <= self._write.context or len(messages) == 1:
                break
            messages, forgotten = messages[2:], forgotten + 2  # a question and its answer
        requests.check_room(ids, "the message", new_tokens=self._new_tokens, context=self._write.context)
        (answer,), timing = self._write([ids], [self._turns], is_chat=[True], **how)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._turns += 1  # each answer draws from its own random stream
        return answer, timing, forgotten


def talk(
    lines: Iterable[str],
    *,
    answer: Callable[[str], tuple[writer.Text, writer.Timing, int]],
    say: Callable[[str], None],
) -> None:
    """Answer line by line; a line that cannot be answered is refused in one line, and the conversation continues."""
    for line in lines:
        if not line.strip():
            continue
        try:
            _, _, forgotten = answer(line)
        except ValueError as error:
            say(f"error: {error}")
            continue
        if forgotten:
            say(f"the oldest {forgotten} messages no longer fit the context of the model and are forgotten")
