"""From logits to a token: penalties and biases as OpenAI documents them, log-probabilities, shares of draws."""

import contextlib
import math

import numpy as np
import pytest

from jaxbench.native import library
from jaxbench.serve import sampler
from jaxbench.serve.request import Request, RequestState, Sampling

PROMPT, ANSWER = (0, 1), (1, 1, 2)
LOGITS = np.array([2.0, 1.0, -1.0, 0.5, -3.0], np.float32)


def state_of(logprobs=None, **sampling):
    """A request after three tokens of its answer."""
    state = RequestState(Request("a", PROMPT, 9, Sampling(**sampling), logprobs=logprobs), 0)
    state.tokens += ANSWER
    return state


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ({}, [2.0, 1.0, -1.0, 0.5, -3.0]),
        ({"frequency_penalty": 0.5}, [2.0, 0.0, -1.5, 0.5, -3.0]),  # once for each time in the answer
        ({"presence_penalty": 0.5}, [2.0, 0.5, -1.5, 0.5, -3.0]),  # once for each token of the answer
        ({"frequency_penalty": -1, "presence_penalty": 0.25}, [2.0, 2.75, -0.25, 0.5, -3.0]),
        ({"repetition_penalty": 2}, [1.0, 0.5, -2.0, 0.5, -3.0]),  # of the prompt's tokens too, never towards zero
        ({"logit_bias": {4: 7.0, 0: -100.0}}, [-98.0, 1.0, -1.0, 0.5, 4.0]),
        (
            {"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": 1, "logit_bias": {1: 4}},
            [1.0, 0.5 - 2 - 1 + 4, -2.0 - 1 - 1, 0.5, -3.0],
        ),
    ],
)
def test_penalties_are_of_the_answer_and_the_repetitions_of_the_whole_text(sampling, wanted):
    state = state_of(**sampling)
    found = sampler.penalized(LOGITS, state.request.sampling, state.tokens, state.tokens[len(PROMPT) :])
    assert found.tolist() == wanted and LOGITS.tolist() == [2.0, 1.0, -1.0, 0.5, -3.0]
    token, _ = sampler.choose(state, LOGITS)
    assert token == max(range(5), key=wanted.__getitem__)


def test_log_probabilities_are_the_models_whatever_the_settings():
    total = math.log(sum(math.exp(each) for each in LOGITS.tolist()))
    state = state_of(logprobs=3, temperature=2.0, logit_bias={4: 100}, repetition_penalty=2, top_k=1)
    token, found = sampler.choose(state, LOGITS)
    assert token == 4 and found.token == pytest.approx(-3.0 - total, abs=1e-12)
    assert [place for place, _ in found.top] == [0, 1, 3]
    assert [value for _, value in found.top] == pytest.approx([2.0 - total, 1.0 - total, 0.5 - total], abs=1e-12)
    tied = sampler.logprobs(np.zeros(4, np.float32), 2, 4)
    assert tied.top == tuple((place, pytest.approx(-math.log(4))) for place in range(4))
    assert sampler.logprobs(LOGITS, 0, 0).top == ()


def test_a_vocabulary_that_is_smaller_than_what_is_wanted_is_shown_whole():
    _, found = sampler.choose(state_of(logprobs=20), LOGITS)
    assert [place for place, _ in found.top] == [0, 1, 3, 2, 4]
    assert sum(math.exp(value) for _, value in found.top) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        ({"temperature": 1.0}, [math.exp(each) for each in LOGITS.tolist()]),
        ({"temperature": 2.0, "top_k": 3}, [math.exp(1), math.exp(0.5), 0, math.exp(0.25), 0]),
        # of 0.61, 0.22, 0.14 the first two have less than 0.9 before the third, which is kept
        ({"temperature": 1.0, "top_p": 0.9}, [math.exp(2), math.exp(1), 0, math.exp(0.5), 0]),
        ({"temperature": 1.0, "min_p": 0.3}, [math.exp(2), math.exp(1), 0, 0, 0]),  # exp(-1) = 0.37, exp(-1.5) = 0.22
        ({"temperature": 1.0, "frequency_penalty": 1}, [math.exp(each) for each in (2, -1, -2, 0.5, -3)]),
    ],
)
@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(kernels, sampling, weights):
    count, counts = 2000, np.zeros(5)
    with library.switched_off() if kernels == "numpy" else contextlib.nullcontext():
        for seed in range(count):
            counts[sampler.choose(state_of(seed=seed, **sampling), LOGITS)[0]] += 1
    share = np.array(weights) / sum(weights)
    spread = 4.5 * np.sqrt(share * (1 - share) / count)  # of five shares one in 30,000 is farther off by chance
    assert (np.abs(counts / count - share) <= spread).all(), (counts / count, share)
