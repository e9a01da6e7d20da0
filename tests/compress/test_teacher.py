"""A teacher of continuations says what the decoder does behind the passage in clear, and nothing of other rows."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxbench import initial, transformer
from jaxbench.compress import compressor, config, rows, teacher
from jaxbench.parity import cases
from jaxbench.pretrained import weights

DECODER = cases.LLAMA
PREFIX = 3
SHAPE = config.CompressorConfig(decoder=DECODER, num_layers=1, chunk=32, prefix=PREFIX)
ROWS = rows.RowsConfig(batch=6, num_chunks=2, num_targets=8, clear=5, sampled=4, reconstruct=0.5, short=0.5, ratio=8)
COUNT = 3


@pytest.fixture(scope="module")
def held():
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}
    return weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "0" * 64)


@pytest.fixture(scope="module")
def taught(held):
    text = np.random.default_rng(0).integers(0, DECODER.vocab_size, 400).astype(np.int32)
    drawn = rows.draw([text], SHAPE, ROWS, seed=0, step=1).arrays
    return teacher.Teacher(held, COUNT, precision="float32", prefix=PREFIX)(drawn)


def tags(arrays):
    count = arrays.groups[0].size
    return (arrays.inputs[:, count] - DECODER.vocab_size - count) // PREFIX


def test_a_continuation_has_the_tokens_that_are_most_probable_behind_its_passage(held, taught):
    model = transformer.build(DECODER, held.params, dtype="float32")
    is_continued = tags(taught) == rows.CONTINUE
    assert 0 < is_continued.sum() < len(is_continued)
    for i in np.flatnonzero(is_continued):
        passage, count = taught.context[i][taught.context[i] >= 0], taught.groups[i].size
        following = taught.inputs[i, count + PREFIX :][taught.positions[i, count + PREFIX :] >= 0]
        text = np.concatenate([passage, following, taught.targets[i][taught.mask[i]][-1:]])
        size = int(taught.mask[i].sum())
        np.testing.assert_array_equal(text[-size:], taught.targets[i][:size])
        tokens, places = text[None, :-1].astype(np.int32), np.arange(len(text) - 1, dtype=np.int32)
        logits = np.asarray(
            jax.jit(lambda model, *row: model.logits(model.features(*row)[0]))(model, tokens, places[None])
        )
        probs = np.asarray(jax.nn.softmax(logits[0, -size:], axis=1))
        np.testing.assert_array_equal(taught.teacher_tokens[i, :size], np.argsort(-probs, axis=1)[:, :COUNT])
        np.testing.assert_allclose(taught.teacher_probs[i, :size], -np.sort(-probs, axis=1)[:, :COUNT], rtol=1e-4)


def test_a_row_that_is_no_continuation_is_not_taught(taught):
    other = tags(taught) != rows.CONTINUE
    assert other.any() and not taught.teacher_probs[other].any()
    assert not taught.teacher_probs[~taught.mask].any()


def test_a_teacher_pulls_where_it_teaches(held, taught):
    """The loss with a teacher is that without one and the cross-entropy of the continuations to the teacher."""
    params = config.starting_params(SHAPE, held.params, seed=0)
    model = compressor.build(SHAPE, params)
    output = jax.jit(compressor.predict)(model, compressor.Batch(*taught))
    loss_of, plain = jax.jit(compressor.loss_of), taught._replace(teacher_tokens=None, teacher_probs=None)
    with_one, without = (float(loss_of(output, compressor.Batch(*each))) for each in (taught, plain))
    log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(output.logits)), taught.teacher_tokens, axis=2)
    expected = -(taught.teacher_probs * log_probs).sum() / taught.mask.sum()
    assert with_one - without == pytest.approx(compressor.TEACHER_WEIGHT * expected, rel=1e-4)
    assert expected > 0
