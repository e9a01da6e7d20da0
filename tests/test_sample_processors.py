"""Processors of logits: what they change, what they draw, and whose state is whose."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.three_backends import BACKENDS, PROMPTS, VOCAB, make


class Forbid:
    """A processor that forbids all tokens below 300, and counts its steps."""

    def __init__(self, array):
        self.array = array

    def init(self, batch_size):
        return self.array([0])

    def apply(self, state, logits, tokens, length, step):
        is_forbidden = self.array(np.arange(VOCAB)[None] < 300)
        low = logits * 0 - 1e9
        return state + 1, (jnp.where if self.array is jnp.asarray else torch.where)(is_forbidden, low, logits)


class Always(Forbid):
    """A processor whose draw takes token 3 in the first row, and where `keeps` is False leaves the others."""

    def __init__(self, array, token=3, *, keeps=True):
        super().__init__(array)
        self.token, self.keeps = token, keeps

    def draw(self, state, logits, tokens, length, step, sample):
        token = np.full(length.shape[0], self.token, np.int32)
        token[1:] = token[1:] if self.keeps else -1
        return state, self.array(token)


class Bias:
    """A processor with a row of its own bias in each row of its state, and a token that all rows share."""

    def __init__(self, array, shared=None):
        self.array, self.seen = array, []
        if shared is not None:
            self.shared = shared

    def init(self, batch_size):
        raise ValueError(f"pass states for {batch_size} rows")

    def apply(self, state, logits, tokens, length, step):
        if hasattr(self, "shared"):
            shared, state = state
            return state, logits + shared + state
        return state, logits + state


@pytest.mark.parametrize(("backend", "array"), [("flax", jnp.asarray), ("torch", torch.tensor)])
def test_processors_change_the_logits_and_may_replace_the_draw(backend, array):
    generation = make(backend, temperature=1.0, processors=[Forbid(array)])(PROMPTS, max_new_tokens=8, seed=0)
    assert generation.tokens.min() >= 300
    generation = make(backend, temperature=1.0, processors=[Always(array)])(PROMPTS, max_new_tokens=8, seed=0)
    assert (generation.tokens == 3).all()


@pytest.mark.parametrize(
    ("backend", "array"), [("flax", jnp.asarray), ("equinox", jnp.asarray), ("torch", torch.tensor)]
)
def test_rows_that_no_processor_draws_are_drawn_as_ever(backend, array):
    plain = make(backend, temperature=1.0)(PROMPTS, max_new_tokens=8, seed=0)
    first, second = Always(array, 3, keeps=False), Always(array, 4, keeps=False)
    first.apply = second.apply = lambda state, logits, *_: (state, logits)
    generation = make(backend, temperature=1.0, processors=[first, second])(PROMPTS, max_new_tokens=8, seed=0)
    assert (generation.tokens[0] == 3).all()
    np.testing.assert_array_equal(generation.tokens[1:], plain.tokens[1:])


@pytest.mark.parametrize(
    ("backend", "array"), [("flax", jnp.asarray), ("equinox", jnp.asarray), ("torch", torch.tensor)]
)
def test_states_of_processors_are_arguments_with_a_row_for_each_prompt(backend, array):
    plain = make(backend, temperature=1.0)(PROMPTS, max_new_tokens=8, seed=0)
    generator = make(backend, temperature=1.0, processors=[Bias(array)])
    state = array(np.zeros((3, VOCAB), np.float32))
    for token in (7, 8):  # the second call finds its program compiled and the state it was given intact
        bias = np.zeros((3, VOCAB), np.float32)
        bias[1, token] = 1e4
        generation = generator(PROMPTS, max_new_tokens=8, seed=0, processor_states=[array(bias)])
        assert (generation.tokens[1] == token).all()
        np.testing.assert_array_equal(generation.tokens[::2], plain.tokens[::2])
        again = generator(PROMPTS, max_new_tokens=8, seed=0, processor_states=[state])
        np.testing.assert_array_equal(again.tokens, plain.tokens)
    assert len(generator.programs) == 1
    with pytest.raises(ValueError, match="pass states for 3 rows"):
        generator(PROMPTS, max_new_tokens=8, seed=0)
    with pytest.raises(ValueError, match="2 states for 1 processors"):
        generator(PROMPTS, max_new_tokens=8, seed=0, processor_states=[state, state])
    with pytest.raises(ValueError, match=r"shape \(2, 601\), wanted 3 rows"):
        generator(PROMPTS, max_new_tokens=8, seed=0, processor_states=[state[:2]])


@pytest.mark.parametrize(("backend", "array"), [("flax", jnp.asarray), ("torch", torch.tensor)])
def test_an_array_that_rows_share_is_no_part_of_the_state(backend, array):
    shared = array(np.where(np.arange(VOCAB) == 5, 1e4, 0).astype(np.float32)[None])
    generator = make(backend, temperature=1.0, processors=[Bias(array, shared)])
    state = array(np.zeros((3, VOCAB), np.float32))
    assert (generator(PROMPTS, max_new_tokens=4, seed=0, processor_states=[state]).tokens == 5).all()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_greedy_decoding_with_a_processor_that_draws_is_refused(backend):
    with pytest.raises(ValueError, match=r"temperature=0.0 .*Always.* carries no mark"):
        make(backend, processors=[Always(np.asarray)])
