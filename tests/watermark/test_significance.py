"""Scores and p-values: calibrated under the null, exact for each scheme, corrected for families."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxbench.watermark import green_lists, null_distributions, reference, significance
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes import synthid

VOCAB = 509
SCHEMES = {
    "kgw": parse_scheme("kgw"),
    "unigram": parse_scheme("unigram"),
    "gumbel": parse_scheme("gumbel"),
    "gumbel vllm": parse_scheme({"scheme": "gumbel", "prf": "vllm"}),
    "gumbel dual": parse_scheme({"scheme": "gumbel", "dual_key_alpha": 0.1}),
    "gumbel dual min": parse_scheme(
        {"scheme": "gumbel", "dual_key_alpha": 0.9, "context": {"kind": "min", "width": 8}}
    ),
    "synthid weighted": parse_scheme("synthid"),
    "synthid mean": parse_scheme({"scheme": "synthid", "score": "mean"}),
    "synthid bayesian": parse_scheme({"scheme": "synthid", "score": "bayesian"}),
    "synthid shallow": parse_scheme({"scheme": "synthid", "depth": 3}),
    "dip": parse_scheme("dip"),
    "morphmark": parse_scheme("morphmark"),
}
LISTS = {  # of other toolkits
    "kgw markllm": parse_scheme("kgw_markllm"),
    "kgw transformers": parse_scheme("kgw_transformers"),
}


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    """Return 600 repetitive texts [N T] that do not depend on any key."""
    return np.random.default_rng(5).zipf(1.4, (600, 50)) % VOCAB


@pytest.fixture(scope="module", params=SCHEMES, ids=lambda name: name.replace(" ", "-"))
def scored(request, texts):
    """Return a scheme, and its evidence and detections about the texts under 600 keys."""
    scheme = SCHEMES[request.param]
    keys = [Key(1000003 * i + 17) for i in range(len(texts))]
    evidence = reference.evidence(scheme, keys, texts, np.full(len(texts), texts.shape[1]), vocab_size=VOCAB)
    return scheme, evidence, significance.score(scheme, evidence, vocab_size=VOCAB)


def test_randomised_p_is_uniform_and_the_exact_one_above_it_for_texts_without_a_mark(scored):
    _, _, found = scored
    assert stats.kstest(found.randomized_p, "uniform").pvalue > 1e-3
    assert (found.p_value >= found.randomized_p).all() and (found.p_value >= found.mid_p).all()
    assert abs(found.score.mean()) < 0.2 and 0.85 < found.score.std() < 1.15


@pytest.mark.parametrize("name", ["unigram", "kgw", "synthid shallow", "dip", *LISTS])
def test_randomised_p_is_uniform_for_texts_of_one_to_eight_tokens(name):
    scheme, random = (SCHEMES | LISTS)[name], np.random.default_rng(11)
    lists = green_lists.lists_of(scheme, vocab_size=VOCAB)
    texts = np.argsort(random.random((3000, VOCAB)), axis=1)[:, : 8 + scheme.context_length]
    keys = [Key(int(value)) for value in random.integers(0, 2**63, len(texts))]
    evidence = reference.evidence(scheme, keys, texts, vocab_size=VOCAB, green_lists=lists)
    for length in range(1, 9):
        beginning = (None if x is None else x[:, : length + scheme.context_length] for x in evidence)
        found = significance.score(scheme, reference.Evidence(*beginning), vocab_size=VOCAB)
        assert (found.num_scored == length).all()
        assert stats.kstest(found.randomized_p, "uniform").pvalue > 1e-4, length
        assert len(np.unique(found.randomized_p)) > 0.9 * min(len(texts), VOCAB)


@pytest.mark.parametrize("name", ["unigram", "kgw markllm"])
def test_a_lists_randomised_p_follows_the_key_and_the_tokens_but_not_what_is_not_scored(name):
    scheme, tokens = (SCHEMES | LISTS)[name], np.arange(6)[None]
    lists = green_lists.lists_of(scheme, vocab_size=VOCAB)
    one = reference.evidence(scheme, Key(1), tokens, vocab_size=VOCAB, green_lists=lists)
    first = significance.score(scheme, one, vocab_size=VOCAB).randomized_p
    hidden = one.inputs + ~one.scored
    assert significance.score(scheme, one._replace(inputs=hidden), vocab_size=VOCAB).randomized_p == first
    other_key = one._replace(
        inputs=reference.evidence(scheme, Key(2), tokens, vocab_size=VOCAB, green_lists=lists).inputs
    )
    other_text = one._replace(inputs=one.inputs + one.scored)
    for other in (other_key, other_text):
        again = significance.score(scheme, other, vocab_size=VOCAB)
        assert again.randomized_p != first
        assert again.p_value == significance.score(scheme, one, vocab_size=VOCAB).p_value


def test_scoring_repeated_inputs_again_is_not_calibrated(texts):
    scheme = SCHEMES["kgw"]
    keys = [Key(1000003 * i + 17) for i in range(len(texts))]
    evidence = reference.evidence(scheme, keys, texts, np.full(len(texts), 50), vocab_size=VOCAB)
    every = evidence._replace(scored=np.broadcast_to(np.arange(50) >= 1, texts.shape))
    found = significance.score(scheme, every, vocab_size=VOCAB)
    assert stats.kstest(found.randomized_p, "uniform").pvalue < 1e-3


def test_totals_are_the_sums_of_token_scores(scored):
    scheme, evidence, found = scored
    total = scheme.statistic(VOCAB).token_scores(evidence).sum(axis=1)
    tail = scheme.statistic(VOCAB).tail(total, found.num_scored)
    np.testing.assert_allclose(found.p_value, tail.upper, rtol=1e-11)
    if scheme.scheme == "gumbel":
        np.testing.assert_allclose(found.statistic, total, rtol=1e-13)
    mean, variance = scheme.statistic(VOCAB).moments()
    each = scheme.statistic(VOCAB).token_scores(evidence)[evidence.scored]
    assert abs(each.mean() - mean) < 5 * np.sqrt(variance / len(each))


def test_the_randomised_p_is_the_same_in_every_run_and_any_padding(scored):
    scheme, evidence, found = scored
    pad = ((0, 0), (0, 13))
    second = evidence.second_words
    wider = reference.Evidence(
        np.pad(evidence.words, pad, constant_values=9),
        np.pad(evidence.scored, pad),
        None if second is None else np.pad(second, pad),
        None if evidence.inputs is None else np.pad(evidence.inputs, pad, constant_values=9),
    )
    again = significance.score(scheme, wider, vocab_size=VOCAB)
    for one, other in zip(found, again):
        if one.dtype == np.float64:
            np.testing.assert_allclose(one, other, rtol=1e-12)
        else:
            assert (one == other).all()
    if scheme.scheme != "gumbel":
        assert (found.randomized_p == again.randomized_p).all()


def test_a_text_too_short_has_p_one_and_a_reason():
    scheme = SCHEMES["gumbel"]
    evidence = reference.evidence(scheme, Key(1), np.ones((3, 6), int), np.array([0, 4, 5]), vocab_size=VOCAB)
    found = significance.score(scheme, evidence, vocab_size=VOCAB)
    assert found.num_scored.tolist() == [0, 0, 1]
    for values in (found.p_value, found.mid_p, found.randomized_p):
        assert values[:2].tolist() == [1.0, 1.0] and values[2] < 1.0
    assert "4 tokens before it" in found.reason[0] and found.reason[2] == ""


def test_kgw_counts_green_tokens_and_tests_them_with_the_binomial():
    words = np.array([[0, 2**30 - 1, 2**30, 2**32 - 1]], np.uint32)
    evidence = reference.Evidence(words, np.array([[True, True, True, False]]))
    found = significance.score(SCHEMES["kgw"], evidence, vocab_size=VOCAB)
    assert (found.num_green[0], found.num_scored[0]) == (2, 3)
    assert found.p_value[0] == pytest.approx(stats.binom.sf(1, 3, 0.25), rel=1e-14)
    assert found.mid_p[0] == pytest.approx(stats.binom.sf(1, 3, 0.25) - stats.binom.pmf(2, 3, 0.25) / 2, rel=1e-14)
    assert found.score[0] == pytest.approx((2 - 0.75) / np.sqrt(3 * 0.25 * 0.75))


def test_unigram_is_tested_without_replacement():
    words = np.array([[0, 0, reference.RED]], np.uint32)
    found = significance.score(SCHEMES["unigram"], reference.Evidence(words, np.ones((1, 3), bool)), vocab_size=10)
    assert found.p_value[0] == pytest.approx(stats.hypergeom.sf(1, 10, 5, 3), rel=1e-13)
    with pytest.raises(ValueError, match="3 distinct tokens in a vocabulary of vocab_size=2"):
        significance.score(SCHEMES["unigram"], reference.Evidence(words, np.ones((1, 3), bool)), vocab_size=2)


def test_synthid_reports_the_weighted_mean_of_its_bits():
    scheme = SCHEMES["synthid shallow"]  # weights 10, 5.5, 1
    assert synthid.weights(3, "weighted") == (20, 11, 2)
    found = significance.score(
        scheme, reference.Evidence(np.array([[0b001, 0b111]], np.uint32), np.ones((1, 2), bool)), vocab_size=VOCAB
    )
    assert found.statistic[0] == pytest.approx((20 + 33) / 66)
    assert found.p_value[0] == pytest.approx(10 / 64, abs=1e-14)  # of 64 pairs of sums of 20, 11, 2, ten reach 53


def test_the_bayesian_statistic_is_a_log_likelihood_ratio():
    scheme = parse_scheme({"scheme": "synthid", "score": "bayesian", "depth": 2})
    evidence = reference.Evidence(np.array([[0b01]], np.uint32), np.ones((1, 1), bool))
    found = significance.score(scheme, evidence, vocab_size=VOCAB)
    first, second = synthid.TWO_LEAVES[:2]
    wanted = np.log((1 + first / 2) * (1 - second / 2))
    assert found.statistic[0] == pytest.approx(wanted, abs=0.02)  # log-odds are rounded to 1/64 nat


# Families


@given(st.floats(1e-300, 1.0), st.integers(1, 65536))
def test_any_of_lies_between_p_and_bonferroni(p, family):
    found = float(significance.any_of(np.array([p]), family)[0])
    assert max(p, null_distributions.FLOOR) * (1 - 1e-12) <= found <= min(1.0, family * p) * (1 + 1e-9)


def test_any_of_keeps_small_p_values_exact():
    assert significance.any_of(np.array([1e-30]), 256)[0] == pytest.approx(256e-30, rel=1e-12)
    assert significance.any_of(np.array([0.5, 1.0]), 2).tolist() == [0.75, 1.0]


def test_identities_differ_where_texts_do_and_the_randomiser_is_uniform():
    tokens = np.random.default_rng(0).integers(0, 9, (2000, 6)).astype(np.uint32)
    identity = significance.text_identity(tokens, np.ones(tokens.shape, bool))
    distinct = np.unique(tokens, axis=0)
    assert len(np.unique(identity)) == len(distinct)
    first = np.unique(identity)
    assert stats.kstest(significance.randomizer(first), "uniform").pvalue > 1e-3
