"""Texts to ids in bulk: the fast tokenizer agrees with the plain one, ragged ids keep their places."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.pretrained import tokenizer
from jaxbench.watermark import texts
from jaxbench.watermark.texts import Ragged, TextEncoder


@functools.cache
def default() -> tokenizer.Tokenizer:
    """Return the default model's tokenizer."""
    return tokenizer.load_tokenizer()


@functools.cache
def encoders() -> tuple[TextEncoder, TextEncoder]:
    """Return encoders with and without fastokens."""
    return TextEncoder(default(), canonicalize=False), TextEncoder(default(), canonicalize=False, fast=False)


WORDS = st.sampled_from(
    ["the", " a", "  ", "\n\n", "'ll", "'S", "12", "½", "\u4e00", "<|im_end|>", "\u200b", "é", "\U0001f600"]
)


@given(st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=12).map("".join))
def test_both_engines_give_equal_ids(text):
    pytest.importorskip("fastokens")
    fast, plain = encoders()
    assert (fast.engine, plain.engine) == ("fastokens", "tokenizers")
    wanted = default().encode(text, add_special=False)
    for encoder in (fast, plain):
        assert encoder.encode([text, "x"]).ids.text(0).tolist() == wanted


def test_a_fast_tokenizer_that_disagrees_is_not_used(monkeypatch):
    pytest.importorskip("fastokens")
    wrong = Ragged.from_lists([[1], [2], []])
    monkeypatch.setattr(texts, "_encode_fast", lambda core, given: wrong)
    assert TextEncoder(default()).engine == "tokenizers"


def test_canonicalisation_is_on_by_default_and_reported():
    attacked = "H\u0435llo w\u200borld"
    found = TextEncoder(default()).encode([attacked, "Hello world"])
    assert found.num_changed.tolist() == [2, 0]
    assert found.ids.text(0).tolist() == found.ids.text(1).tolist()
    kept = TextEncoder(default(), canonicalize=False).encode([attacked])
    assert kept.ids.text(0).tolist() != found.ids.text(0).tolist() and kept.num_changed.tolist() == [0]


def test_a_tokenizer_of_a_larger_vocabulary_is_refused():
    with pytest.raises(ValueError, match="tokenizer has 49152 tokens and the detector's vocabulary 32000"):
        TextEncoder(default(), vocab_size=32000)
    TextEncoder(default(), vocab_size=50000)  # logits are often padded


def test_tokenizers_of_other_libraries_give_the_same_ids(tmp_path):
    import tokenizers
    import transformers

    default().save(tmp_path)
    given = ["The 12 quick foxes' jumps.", "", "\u4e00 \U0001f600 <|im_start|> x" * 90]
    wanted = [default().encode(text, add_special=False) for text in given]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for other in (theirs, core):
        found = TextEncoder(other, vocab_size=49152, canonicalize=False).encode(given).ids
        assert [found.text(i).tolist() for i in range(3)] == wanted
        with pytest.raises(ValueError, match="tokenizer has 49152 tokens"):
            TextEncoder(other, vocab_size=49151)
    theirs.add_tokens(["<one_more>"])  # which their vocab_size does not count
    with pytest.raises(ValueError, match="tokenizer has 49153 tokens"):
        TextEncoder(theirs, vocab_size=49152)
    with pytest.raises(ValueError, match="tokenizer is a dict, wanted one of jaxbench, transformers or tokenizers"):
        TextEncoder({})


def test_a_tokenizer_that_cuts_and_pads_texts_is_read_without_its_limits(tmp_path):
    import tokenizers

    default().save(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=8)
    core.encode_special_tokens = True
    given = ["The 12 quick foxes' jumps are over.", "a", "<|im_start|>"]
    found = TextEncoder(core, canonicalize=False).encode(given).ids
    wanted = [default().encode(text, add_special=False) for text in given[:2]]
    assert [found.text(i).tolist() for i in range(2)] == wanted and found.lengths[2] > 1
    assert core.truncation["max_length"] == 4 and core.padding["length"] == 8


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8), st.randoms())
def test_ragged_ids_are_taken_in_any_order(lists, random):
    ragged = Ragged.from_lists(lists)
    assert len(ragged) == len(lists) and ragged.lengths.tolist() == [len(one) for one in lists]
    rows = np.array(random.sample(range(len(lists)), len(lists)), np.int64)
    for row, ids in zip(rows, ragged.take(rows)):
        assert ids[: len(lists[row])].tolist() == lists[row] and not ids[len(lists[row]) :].any()
        assert ragged.text(row).tolist() == lists[row]


def test_rows_of_an_array_lie_end_to_end():
    tokens = np.arange(6).reshape(2, 3)
    assert Ragged.from_array(tokens).take(np.arange(2)).tolist() == tokens.tolist()
    assert Ragged.from_array(tokens).offsets.tolist() == [0, 3, 6]
