"""Conversations: what the model is asked in each turn, what is forgotten, what a bad message leaves."""

from __future__ import annotations

import pytest

from jaxbench.generation import conversation, writer
from jaxbench.generation.pieces import Text


class Echo:
    """Stand in for the writer: remember what it was asked, answer with a number."""

    context = 128

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.rows = tokenizer, [], []

    def __call__(self, prompts, rows, **how):
        self.asked.append(self.tokenizer.decode(prompts[0]))
        self.rows += rows
        answer = Text(self.tokenizer)
        answer.update(self.tokenizer.encode(f"answer {len(self.asked)}"), is_full=True)
        return [answer], writer.Timing(len(prompts[0]), 1, 0.0, 0.0, 0)


@pytest.fixture
def write(text):
    return Echo(text)


def test_each_turn_asks_with_all_turns_before_it_in_the_template(write, text):
    held = conversation.Conversation(write, text, new_tokens=8, system="S")
    for word in ("one", "two"):
        held.ask(word)
    assert write.asked == [
        "[system]S[user]one[assistant]",
        "[system]S[user]one[assistant]answer 1[user]two[assistant]",
    ]
    assert write.rows == [0, 1], "each answer draws from a stream of its own"


def test_the_oldest_turns_are_forgotten_where_they_no_longer_fit(write, text):
    held = conversation.Conversation(write, text, new_tokens=8, system="S")
    forgotten = [held.ask(letter * 20)[2] for letter in "abcd"]
    assert forgotten == [0, 0, 2, 2]
    assert write.asked[-1].startswith("[system]S[user]" + "c" * 20) and "b" not in write.asked[-1]


def test_a_message_that_fits_not_even_alone_leaves_the_conversation_as_it_was(write, text):
    held = conversation.Conversation(write, text, new_tokens=8)
    held.ask("one")
    before = list(held.messages)
    with pytest.raises(ValueError, match="the message has 217 tokens.*context of 128"):
        held.ask("x" * 200)
    with pytest.raises(ValueError, match="the message is empty"):
        held.ask("")
    assert held.messages == before


def test_a_conversation_goes_on_after_a_bad_line(write, text):
    held, said = conversation.Conversation(write, text, new_tokens=8), []
    lines = ["one", "", "x" * 200, "a" * 30, "b" * 30]
    conversation.talk(lines, answer=held.ask, say=said.append)
    assert len(write.asked) == 3
    assert said[0].startswith("error: the message has 217 tokens")
    assert said[1] == "the oldest 2 messages no longer fit the context of the model and are forgotten"
