"""Perplexity, entropy and divergence against numpy on a tiny model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.watermark import config, keys, reference
from jaxbench.watermark.logits_processor import Watermark
from jaxbench.watermark.schemes import morphmark
from jaxbench.watermark.study import quality

VOCAB = 97
CONFIG = TransformerConfig(
    vocab_size=VOCAB, d_model=16, d_ff=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_seq_len=64
)
TEXTS = [[5, 9, 2, 77, 31, 4], [1, 2], [8] * 20, [3]]


@pytest.fixture(scope="module")
def model():
    params = initial.initial_params(CONFIG, 0, distinct=True)
    params["embed.embedding"] = params["embed.embedding"] * 3  # logits far from uniform
    return transformer.build(CONFIG, params)


@pytest.fixture(scope="module")
def log_probabilities(model):
    """Return the float64 log-probabilities [T V] of each text, from the model's own logits."""
    forward = jax.jit(lambda tokens, positions: model(tokens, positions))
    found = []
    for ids in TEXTS:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        positions = np.where(np.arange(64) < len(ids), np.arange(64), -1)[None].astype(np.int32)
        logits = np.asarray(forward(tokens, positions), np.float64)[0, : len(ids)]
        found.append(logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
                     - logits.max(1, keepdims=True))  # fmt: skip
    return found


@pytest.fixture(scope="module")
def scorer(model):
    return quality.Scorer(model, batch_size=3)


def test_perplexity_and_entropy_are_those_of_numpy(scorer, log_probabilities):
    scores = scorer(TEXTS)
    assert scores.num_scored.tolist() == [5, 1, 19, 0]
    for row, (ids, logs) in enumerate(zip(TEXTS[:3], log_probabilities)):
        nll = -np.mean([logs[t, ids[t + 1]] for t in range(len(ids) - 1)])
        entropy = -np.mean((np.exp(logs[:-1]) * logs[:-1]).sum(axis=1))
        np.testing.assert_allclose(scores.nll[row], nll, rtol=1e-5)
        np.testing.assert_allclose(scores.entropy[row], entropy, rtol=1e-5)
    assert 0.3 < entropy < 4.5  # neither certain nor uniform, where every mistake would look alike
    assert np.isnan([scores.nll[3], scores.excess[3], scores.divergence[0]]).all()


def test_prompt_tokens_are_context_and_not_scored(scorer, log_probabilities):
    scores = scorer(TEXTS[:1], prompt_lengths=[4])
    logs, ids = log_probabilities[0], TEXTS[0]
    assert scores.num_scored.tolist() == [2]
    np.testing.assert_allclose(scores.nll[0], -(logs[3, ids[4]] + logs[4, ids[5]]) / 2, rtol=1e-5)


def test_scores_do_not_depend_on_the_batch(scorer):
    together, alone = scorer(TEXTS), scorer(TEXTS[2:3])
    np.testing.assert_allclose(together.nll[2], alone.nll[0], rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_divergence_of_a_bias_is_that_of_numpy(scorer, log_probabilities, temperature):
    class Bias:
        """Adds 2 to the logits of even tokens in rows whose state is set."""

        def apply(self, state, logits, tokens, length, step):
            even = (jnp.arange(VOCAB) % 2 == 0)[None, :] & state[:, None]
            return state, logits + jnp.where(even, 2.0, 0.0)

    is_marked = np.array([True, False, True, True])
    scores = scorer(TEXTS, processor=Bias(), states=lambda rows: is_marked[list(rows)], temperature=temperature)
    for row in (0, 2):
        plain = log_probabilities[row][:-1] / temperature
        plain = plain - np.log(np.exp(plain).sum(1, keepdims=True))
        marked = (log_probabilities[row][:-1] + 2.0 * (np.arange(VOCAB) % 2 == 0)) / temperature
        marked = marked - np.log(np.exp(marked).sum(1, keepdims=True))
        expected = (np.exp(marked) * (marked - plain)).sum(1).mean()
        np.testing.assert_allclose(scores.divergence[row], expected, rtol=1e-4)
    assert scores.divergence[1] == pytest.approx(0, abs=1e-6)


def test_tokens_that_a_mark_bans_leave_the_divergence_a_number(scorer, log_probabilities):
    scheme, key = config.parse_scheme({"scheme": "morphmark", "form": "linear", "k": 100.0, "p_0": 0.0}), keys.Key(5)
    watermark = Watermark(scheme, vocab_size=VOCAB)
    found = scorer(TEXTS[:1], processor=watermark, states=lambda rows: watermark.state([key] * len(rows)))
    expected = []
    for logs, ids in zip(log_probabilities[0][:-1], TEXTS[0]):
        texts = np.stack([np.full(VOCAB, ids), np.arange(VOCAB)], axis=1)
        words = reference.evidence(scheme, key, texts, vocab_size=VOCAB).words[:, 1]
        marked = morphmark.reweight(np.exp(logs), scheme.is_green(words), scheme)
        assert (marked == 0).any()
        expected.append(sum(p * (np.log(p) - log) for p, log in zip(marked, logs) if p > 0))
    np.testing.assert_allclose(found.divergence[0], np.mean(expected), rtol=1e-4)


def test_a_watermark_diverges_more_with_a_larger_bias(scorer):
    found = []
    for delta in (0.0, 1.0, 3.0):
        mark = Watermark(config.Kgw(gamma=0.5, delta=delta), vocab_size=VOCAB)
        scores = scorer(TEXTS[:3], processor=mark, states=lambda rows, m=mark: m.state([keys.Key(7)] * len(rows)))
        found.append(np.nanmean(scores.divergence))
    assert found[0] == pytest.approx(0, abs=1e-6) and 0 < found[1] < found[2]


def test_the_excess_is_zero_in_expectation_for_the_models_own_draws(scorer, log_probabilities):
    # The expectation over the next token of -log p - entropy is 0 by definition; the scorer's terms must fit together.
    logs = log_probabilities[0][0]
    scores = scorer([[5, token] for token in range(VOCAB)])
    assert np.sum(np.exp(logs) * scores.excess) == pytest.approx(0, abs=1e-4)
    assert np.ptp(scores.excess) > 1


def test_bad_input_is_refused(scorer, model):
    with pytest.raises(ValueError, match="2 prompts for 1 texts"):
        scorer([[1, 2]], prompt_lengths=[1, 1])
    with pytest.raises(ValueError, match="temperature=0"):
        scorer([[1, 2]], temperature=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        quality.Scorer(model, batch_size=0)


def test_no_texts_give_no_scores(scorer):
    assert scorer([]).nll.shape == (0,)
