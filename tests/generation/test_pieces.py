"""Text that is shown while it comes: never taken back, and in the end the whole text; stop strings."""

from __future__ import annotations

import functools
import types

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxbench.generation import pieces
from jaxbench.pretrained.tokenizer import Tokenizer

END = 0
WORDS = ["\u2581a", "b", "\u2581", "caf\u00e9", "\u2581the", "e", "ab", "ba"]


@functools.cache
def byte_level() -> Tokenizer:
    """Return a vocabulary of an end token and 256 bytes."""
    names = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    return Tokenizer(core, eos_id=END, bos_id=None, chat_template=None)


@functools.cache
def sentencepiece() -> Tokenizer:
    """Return a vocabulary of an end token, words and 256 bytes, decoded as Llama's is."""
    names = ["<end>", *WORDS, *(f"<0x{i:02X}>" for i in range(256))]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens(["<end>"])
    return Tokenizer(core, eos_id=END, bos_id=None, chat_template=None)


def streamed(tokenizer, ids, cuts, stop=(), prompt=()):
    """Return the pieces that come when the ids arrive in parts that end at `cuts`, and the text."""
    row = pieces.Text(tokenizer, stop, prompt=prompt)
    shown = [row.update(ids[:cut], is_full=False) for cut in sorted(cuts)]
    return [*shown, row.update(ids, is_full=True)], row


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece], ids=["byte level", "SentencePiece"])
@given(data=st.data())
def test_pieces_put_together_are_the_whole_text_whatever_the_steps(tokenizer, data):
    vocabulary = tokenizer()
    endless = types.SimpleNamespace(core=vocabulary.core, decode=vocabulary.decode, end_ids=())  # end tokens go on
    words = st.integers(0, len(WORDS) if tokenizer is sentencepiece else vocabulary.vocab_size - 1)
    ids = data.draw(st.lists(st.one_of(words, st.integers(0, vocabulary.vocab_size - 1)), max_size=24))
    cuts = data.draw(st.one_of(st.just(range(len(ids))), st.lists(st.integers(0, len(ids)), max_size=6)))
    shown, row = streamed(endless, ids, cuts)
    assert "".join(shown) == row.text == vocabulary.decode(ids, skip_special=True)
    assert row.ended == "length" and row.ids == ids


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece], ids=["byte level", "SentencePiece"])
@given(data=st.data())
def test_a_prompt_and_the_text_that_goes_on_from_it_are_the_text_of_all_ids(tokenizer, data):
    vocabulary = tokenizer()
    endless = types.SimpleNamespace(core=vocabulary.core, decode=vocabulary.decode, end_ids=())
    letters = range(1, len(WORDS) + 1) if tokenizer is sentencepiece else vocabulary.encode("ab e.")
    prompt = data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=5))
    ids = data.draw(
        st.lists(st.one_of(st.sampled_from(letters), st.integers(0, vocabulary.vocab_size - 1)), max_size=9)
    )
    shown, row = streamed(endless, ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=6)), prompt=prompt)
    whole = vocabulary.decode([*prompt, *ids], skip_special=True)
    assert "".join(shown) == row.text
    if row.goes_on:  # a prompt of spaces alone has no text of its own in SentencePiece's vocabulary
        assert vocabulary.decode(prompt) + row.text == whole
    else:
        assert row.text == vocabulary.decode(ids, skip_special=True) and not vocabulary.decode(prompt).strip()


def test_the_first_space_is_of_a_continuation_and_not_of_a_text_of_its_own():
    vocabulary = sentencepiece()
    the, a = (vocabulary.core.token_to_id(f"\u2581{word}") for word in ("the", "a"))
    shown, row = streamed(vocabulary, [the, a, END], range(3), prompt=[a, the, END])
    assert row.text == "".join(shown) == " the a" and row.goes_on
    assert streamed(vocabulary, [the, a, END], range(3))[1].text == "the a"
    assert streamed(vocabulary, [the, a, END], range(3), prompt=[END])[1].text == "the a", "nothing to go on from"
    stopped = streamed(vocabulary, [the, a, END], range(3), stop=(" the",), prompt=[a])[1]
    assert (stopped.text, stopped.ended, stopped.ids) == ("", "stop", [the])
    euro = [vocabulary.core.token_to_id(f"<0x{byte:02X}>") for byte in "\u20ac".encode()]
    assert streamed(vocabulary, [*euro[2:], the], range(2), prompt=[a, *euro[:2]])[1].text == "\ufffd the"


def test_a_long_text_costs_no_more_a_token_than_a_short_one():
    vocabulary, decoded = byte_level(), []
    counting = types.SimpleNamespace(
        core=vocabulary.core, end_ids=vocabulary.end_ids,
        decode=lambda ids, **how: decoded.append(len(ids)) or vocabulary.decode(ids, **how),
    )  # fmt: skip
    row, ids = pieces.Text(counting), vocabulary.encode("A text of some length. " * 40)
    for count in range(1, len(ids)):
        row.update(ids[:count], is_full=False)
    assert row.text == vocabulary.decode(ids[:-1]) and max(decoded) <= 2


def test_no_half_of_a_character_is_shown():
    vocabulary = sentencepiece()
    ids = [vocabulary.core.token_to_id(f"<0x{byte:02X}>") for byte in "\u20ac\u00e9".encode()]
    ids.append(vocabulary.core.token_to_id("b"))
    shown, row = streamed(vocabulary, ids, range(len(ids)))
    assert row.text == "\u20ac\u00e9b" and shown[-1] == "\u20ac\u00e9b" and set(shown[:-1]) == {""}


def test_the_end_token_ends_a_row_and_is_no_text():
    vocabulary = sentencepiece()
    row = pieces.Text(vocabulary)
    b = vocabulary.core.token_to_id("b")
    assert row.update([b, b, END], is_full=False) == "bb"
    assert (row.text, row.ended, row.ids) == ("bb", "end", [b, b, END])
    assert row.update([b, b, END, b], is_full=True) == "" and row.ids == [b, b, END]


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece], ids=["byte level", "SentencePiece"])
def test_a_special_token_that_is_a_stop_string_ends_the_text_though_no_text_shows_it(tokenizer):
    vocabulary = tokenizer()
    endless = types.SimpleNamespace(core=vocabulary.core, decode=vocabulary.decode, end_ids=())
    b, e = (vocabulary.core.token_to_id(letter) for letter in "be")
    ids = [b, e, END, b, END, e]
    for cuts in ((), range(len(ids)), (4,)):
        shown, row = streamed(endless, ids, cuts, ("<end>", "bb"))
        assert ("".join(shown), row.text, row.ended, row.ids) == ("be", "be", "stop", [b, e, END])
    assert streamed(endless, ids, range(6), ("<end>", "e"))[1].ids == [b, e], "a text's stop string in front of it"
    assert streamed(endless, ids, range(6), ("\u2581", "x"))[1].text == "bebe", "a piece that is no special token"
    assert streamed(vocabulary, [b, END], range(2), ("<end>",))[1].ended == "end"


def cut_by_hand(text: str, stop: list[str]) -> str:
    """Return a text up to the stop string that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return text[: min(starts)]
    return text


@given(data=st.data())
def test_stop_strings_cut_at_the_same_place_whatever_the_steps(data):
    vocabulary = sentencepiece()
    ids = data.draw(st.lists(st.integers(1, len(WORDS)), max_size=20))
    stop = data.draw(st.lists(st.text("ab e", min_size=1, max_size=4), min_size=1, max_size=3))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    shown, row = streamed(vocabulary, ids, cuts, stop)
    whole = vocabulary.decode(ids, skip_special=True)
    assert "".join(shown) == row.text == cut_by_hand(whole, stop)
    assert row.ended == ("stop" if any(word in whole for word in stop) else "length")
    assert row.ids == streamed(vocabulary, ids, (), stop)[1].ids
    if row.ended == "stop":
        held = [any(word in vocabulary.decode(part) for word in stop) for part in (row.ids, row.ids[:-1])]
        assert held == [True, False], "no token behind the one that completes the stop string"


def test_what_may_begin_a_stop_string_waits():
    assert pieces.held_back("say END", ["END OF"]) == 3
    assert pieces.held_back("say END.", ["END OF"]) == 0
    assert pieces.held_back("xaab", ["abc", "aabx"]) == 3
    assert pieces.first_stop("abcabX", ["bX", "ca"]) == 2
    assert pieces.first_stop("abc", ["x"]) is None
