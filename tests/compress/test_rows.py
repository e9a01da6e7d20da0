"""Rows that a compressor is trained on: passages, vectors' places, what is asked; the same for a seed and a step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.compress import config, rows
from jaxbench.parity import cases

CONFIG = cases.COMPRESSOR
SIZE = CONFIG.decoder.vocab_size
TEXT = np.arange(200, dtype=np.int32) % SIZE


@given(seed=st.integers(0, 10**6), step=st.integers(0, 10**6), aligned=st.booleans(), prefix=st.sampled_from([1, 4]))
def test_every_row_asks_for_what_its_passage_or_the_text_behind_it_says(seed, step, aligned, prefix):
    shape = CONFIG.model_copy(update={"prefix": prefix})
    settings = rows.RowsConfig(batch=6, num_targets=12, sampled=5, aligned=float(aligned), dropout=0.5, clear=5)
    ratio, drawn = rows.draw([TEXT, TEXT[:9]], shape, settings, seed=seed, step=step)
    again = rows.draw([TEXT, TEXT[:9]], shape, settings, seed=seed, step=step).arrays
    for one, other in zip(drawn, again):
        np.testing.assert_array_equal(one, other)
    per_chunk = CONFIG.chunk // ratio
    vectors = 2 * per_chunk
    assert drawn.groups.shape == (6, 2, per_chunk) and drawn.inputs.shape == (6, vectors + prefix - 1 + 5 + 12)
    for i in range(6):
        row = config.Arrays(*(each if each is None else each[i] for each in drawn))
        passage = row.context[row.context >= 0]
        own, count = row.inputs[vectors : vectors + prefix] - SIZE - vectors, int(row.mask.sum())
        tag = int(own[0]) // prefix
        np.testing.assert_array_equal(own, tag * prefix + np.arange(prefix))
        asked, clear = row.targets[:count], row.places[0] - vectors - prefix + 1
        chunks = [each[each >= 0] for each in row.context]
        if tag == rows.CONTINUE:
            following = (passage[-1] + 1 + np.arange(clear + 12)) % SIZE
            np.testing.assert_array_equal(asked, following[clear:])
            assert 0 <= clear <= 5
            seen = row.groups.reshape(-1) >= 0
        else:
            assert tag == rows.RECONSTRUCT and clear <= 5
            seen = (row.groups >= 0) & (row.positions[:vectors].reshape(2, -1) >= 0)
            (chunk,) = np.flatnonzero(seen.any(axis=1))
            start = int(np.flatnonzero(chunks[chunk] == asked[0])[0])  # no token comes twice in a chunk
            np.testing.assert_array_equal(asked, chunks[chunk][start : start + 12])
            following = chunks[chunk][start - clear : start + 12]
            assert clear == min(start, 5)
            np.testing.assert_array_equal(seen[chunk], row.groups[chunk] >= 0)
            seen = seen.reshape(-1)
        used = row.positions[row.positions >= 0]
        assert np.array_equal(row.positions[:vectors] >= 0, seen) and (np.diff(used) > 0).all()
        places = row.groups + CONFIG.chunk * (np.arange(2)[:, None] if tag == rows.CONTINUE else 0)
        wanted = places.reshape(-1)[seen] if aligned else np.arange(seen.sum())
        np.testing.assert_array_equal(row.positions[:vectors][seen], wanted)
        inputs = row.inputs[vectors + prefix : vectors + prefix - 1 + clear + count]
        hidden = inputs == SIZE + vectors + rows.BLANK * prefix
        np.testing.assert_array_equal(inputs[~hidden], following[:-1][~hidden])
        assert tag == rows.RECONSTRUCT or not hidden.any()
        for part, sampled in zip(chunks, row.sampled):
            assert ((sampled < len(part)) & (sampled >= (0 if len(part) else -1))).all()


@given(length=st.integers(0, 12), ratio=st.sampled_from([2, 4]))
def test_a_chunk_has_as_many_vectors_as_its_tokens_need(length, ratio):
    groups = config.group_positions(length, ratio, 12)
    assert (groups >= 0).sum() == -(-length // ratio) and len(groups) == 12 // ratio


@pytest.mark.parametrize("update, words", [({"ratio": 3}, "ratio=3; wanted one of 2, 4"), ({"num_targets": 13}, "=13")])
def test_rows_that_do_not_fit_a_compressor_are_named(update, words):
    with pytest.raises(ValueError, match=words):
        rows.draw([TEXT], CONFIG, rows.RowsConfig(**{"num_targets": 12, "clear": 0, **update}), seed=0, step=0)


def test_a_text_that_is_too_short_is_named():
    with pytest.raises(ValueError, match="the longest text has 9 tokens; wanted 37"):
        rows.draw([TEXT[:9]], CONFIG, rows.RowsConfig(num_targets=12, clear=1), seed=0, step=0)


@pytest.mark.parametrize(
    "update, words",
    [
        ({"ratios": (2, 5)}, r"ratios=\[2, 5\] must rise and divide chunk=12"),
        ({"ratios": (4, 2)}, "must rise"),
        ({"ratios": ()}, "must rise"),
        ({"num_layers": 4}, "num_layers=4 of a decoder that has 3"),
        ({"decoder": CONFIG.decoder.model_copy(update={"sliding_window": 4})}, "sliding_window=4"),
        ({"decoder": CONFIG.decoder.model_copy(update={"position": "learned"})}, "position=learned"),
    ],
)
def test_shapes_that_cannot_be_are_named(update, words):
    with pytest.raises(ValueError, match=words):
        config.CompressorConfig(**{**dict(CONFIG), **update})


def test_a_ratio_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="ratio=3; wanted one of 2, 4"):
        CONFIG.check_ratio(3)


def test_above_a_ratio_that_nothing_is_read_back_from_every_row_is_continued():
    settings = rows.RowsConfig(batch=8, num_targets=12, sampled=5, clear=5, reconstruct=1.0, readable=2)
    for ratio, tag in ((2, rows.RECONSTRUCT), (4, rows.CONTINUE)):
        drawn = rows.draw([TEXT], CONFIG, settings.model_copy(update={"ratio": ratio}), seed=0, step=0).arrays
        vectors = drawn.groups[0].size
        assert (drawn.inputs[:, vectors] == SIZE + vectors + tag).all()
