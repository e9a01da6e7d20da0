"""Rows that are continued: the same tokens in any batch, step and backend, shown as they come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxbench.generation import writer
from jaxbench.prompts import SamplingParams
from tests.generation import tiny

PROMPTS = ["The first prompt", "A second one, longer", "x"]
DRAWN = writer.Settings(24, SamplingParams(temperature=1.0, top_k=40), seed=3)


def encoded(text):
    return [text.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def written(flax, text):
    """The three rows in one batch."""
    return writer.Writer(flax, text, DRAWN)(encoded(text), [0, 1, 2])


def test_a_row_is_the_same_alone_and_in_a_batch(flax, text, written):
    write = writer.Writer(flax, text, DRAWN)
    for row, prompt in enumerate(encoded(text)):
        (alone,), _ = write([prompt], [row])
        assert (alone.ids, alone.text) == (written[0][row].ids, written[0][row].text)
    (other,), _ = write([encoded(text)[0]], [1])
    assert other.ids != written[0][0].ids, "another row draws from another stream"


def test_the_pieces_shown_are_the_text(flax, text, written):
    shown = []
    (row,), timing = writer.Writer(flax, text, DRAWN)([encoded(text)[0]], [0], step=4, show=shown.append)
    assert "".join(shown) == row.text == written[0][0].text
    assert len(shown) > 2
    assert (timing.prompt_tokens, timing.tokens) == (len(PROMPTS[0]), len(row.ids))


def test_one_new_token_is_the_first_of_many(flax, text, written):
    settings = DRAWN._replace(new_tokens=1)
    (row,), timing = writer.Writer(flax, text, settings)([encoded(text)[0]], [0])
    assert row.ids == written[0][0].ids[:1] and row.ended == "length"
    assert "tokens/s" not in timing.line(flax)


def test_a_stop_string_ends_its_row_alone(flax, text, written):
    whole = written[0][1].text
    word = next(whole[i : i + 2] for i in range(4, len(whole)) if "\ufffd" not in whole[i : i + 2])
    rows, timing = writer.Writer(flax, text, DRAWN._replace(stop=(word,)))(encoded(text), [0, 1, 2])
    for row, before in zip(rows, written[0]):
        assert row.text == before.text.partition(word)[0]
        assert row.ids == before.ids[: len(row.ids)]
    assert rows[1].ended == "stop" and len(rows[1].ids) < len(written[0][1].ids)
    decoded = sum(len(row.ids) - 1 for row in written[0])  # what is behind the stop string took its time too
    assert timing.decoded == decoded > timing.tokens - 3


def test_a_prompts_continuation_has_its_first_space_and_a_message_has_none(flax, text, written):
    spaces = SimpleNamespace(  # every token is a word with a space in front, which a text's first one loses
        core=None, end_ids=(), decode=lambda ids, skip_special: "".join(f" w{i}" for i in ids).removeprefix(" ")
    )  # fmt: skip
    rows, _ = writer.Writer(flax, spaces, DRAWN)(encoded(text), [0, 1, 2], is_chat=[True, False, True])
    assert [row.text.startswith(" ") for row in rows] == [False, True, False]
    assert [row.text.split() for row in rows] == [[f"w{i}" for i in row.ids] for row in rows]


@pytest.mark.parametrize("backend", ["equinox", "torch"])
def test_every_backend_draws_the_same_tokens(backend, folder, text, written):
    rows, _ = writer.Writer(tiny.load(folder, backend), text, DRAWN)(encoded(text), [0, 1, 2])
    assert [row.ids for row in rows] == [row.ids for row in written[0]]


@pytest.mark.skipif(not tiny.has_native(), reason=tiny.NEEDS_NATIVE)
@pytest.mark.parametrize("backend", tiny.MODULES)
def test_native_kernels_draw_the_same_tokens_in_any_batch_and_step(backend, folder, text, written):
    loaded = tiny.load(folder, backend, "native")
    assert loaded.choice.kernels == "native" and loaded.weights == "float32"
    write = writer.Writer(loaded, text, DRAWN)
    rows, timing = write(encoded(text), [0, 1, 2])
    assert [row.ids for row in rows] == [row.ids for row in written[0]]
    assert write([encoded(text)[1]], [1], step=5)[0][0].ids == rows[1].ids
    assert timing.line(loaded).endswith("native kernels, weights float32, cache float32, activations float32")


def test_a_prompt_that_does_not_fit_is_refused(flax, text):
    with pytest.raises(ValueError, match="context of 128"):
        writer.Writer(flax, text, DRAWN)([[1] * 120], [0])


def test_the_line_of_a_run_says_what_was_computed(flax):
    timing = writer.Timing(prompt_tokens=5, tokens=11, prompt_s=0.25, decode_s=2.0, decoded=10)
    wanted = "5 prompt tokens in 250 ms, 11 new tokens, 5.0 tokens/s; xla kernels, weights float32"
    assert timing.line(flax) == wanted
