"""Guessing and forging: a weak key is found, a strong one is not, and copied n-grams pass for marked text."""

import numpy as np
import pytest

from jaxbench.watermark import config, keys, reference, significance
from jaxbench.watermark.attack import spoofing

VOCAB = 200
SCHEME = config.Kgw(gamma=0.25, delta=9.0, context=reference.ContextRule(width=1))


def green_text(key, count, length, seed):
    """Return texts whose tokens are the first green ones of eight random candidates."""
    pairs = np.stack(np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"), axis=-1).reshape(-1, 2)
    sizes = np.full(len(pairs), 2, np.int32)
    words = reference.evidence(SCHEME, key, pairs.astype(np.int32), sizes, vocab_size=VOCAB).words[:, 1]
    is_green = SCHEME.is_green(words).reshape(VOCAB, VOCAB)
    candidates = np.random.default_rng(seed).integers(0, VOCAB, (count, length, 8))
    texts = candidates[:, :, 0].astype(np.int32)
    for t in range(1, length):
        best = is_green[texts[:, t - 1, None], candidates[:, t]].argmax(axis=1)
        texts[:, t] = np.take_along_axis(candidates[:, t], best[:, None], axis=1)[:, 0]
    return texts


def p_values(texts, key):
    texts = np.asarray(texts, np.int32)
    lengths = np.full(len(texts), texts.shape[1], np.int32)
    evidence = reference.evidence(SCHEME, key, texts, lengths, vocab_size=VOCAB)
    return significance.score(SCHEME, evidence, vocab_size=VOCAB).p_value


@pytest.fixture(scope="module")
def guesses():
    return spoofing.guessed_keys()


def test_a_weak_key_is_guessed_and_a_strong_one_is_not(guesses):
    weak, strong = keys.Key(42), keys.Key(0x9A3F00C1D2E4B5F6)
    found = spoofing.guess(lambda key: p_values(green_text(weak, 4, 120, 0), key), guesses)
    assert found[0].name == "number 42" and found[0].corrected_p < 1e-6 and found[1].corrected_p > 0.01
    assert spoofing.guess(lambda key: p_values(green_text(strong, 4, 120, 0), key), guesses)[0].corrected_p > 0.01


def test_the_guesses_are_different_keys(guesses):
    assert len({key.halves for _, key in guesses}) == len(guesses) >= 20


def test_the_correction_counts_guesses_and_texts():
    found = spoofing.guess(lambda key: np.array([1e-4, 0.5]), [("a", keys.Key(1)), ("b", keys.Key(2))])
    assert [one.corrected_p for one in found] == pytest.approx([4e-4, 4e-4])


def test_text_forged_from_marked_samples_passes_and_from_plain_ones_does_not():
    key = keys.Key(0x1234567890ABCDEF)
    marked, plain = green_text(key, 20, 200, 1), np.random.default_rng(2).integers(0, VOCAB, (20, 200))
    forged = [spoofing.forge(spoofing.learn(marked, plain, width=1), num_tokens=100, seed=0, index=i) for i in range(5)]
    assert np.shape(forged) == (5, 100)
    assert (p_values(forged, key) < 1e-5).all()
    assert len({tuple(text) for text in forged}) == 5
    fake = [spoofing.forge(spoofing.learn(plain, marked, width=1), num_tokens=100, seed=0, index=i) for i in range(5)]
    assert (p_values(fake, key) > 1e-3).all()


def test_a_forged_text_uses_each_learnt_n_gram_once():
    learnt = spoofing.learn([[1, 2, 3, 4, 5, 6, 7, 8]], [], width=2)
    made = spoofing.forge(learnt, num_tokens=8, seed=0)
    assert made == spoofing.forge(learnt, num_tokens=8, seed=0)


def test_bad_samples_are_refused():
    with pytest.raises(ValueError, match="none of 1 marked samples has more than 4 tokens"):
        spoofing.learn([[1, 2]], [], width=4)
    with pytest.raises(ValueError, match="width=0, wanted at least 1"):
        spoofing.learn([[1, 2]], [], width=0)


def test_the_longest_copy_is_the_longest_passage_in_common():
    samples = [[1, 2, 3, 4, 5], [9, 4, 5, 6, 7, 7]]
    for text, length in (([3, 4, 5, 6, 7, 1], 4), ([0, 1, 2, 0], 2), ([8, 8], 0), ([], 0), ([7, 7, 7], 2), ([6, 5], 1)):
        assert spoofing.longest_copy(text, samples) == length


def test_a_forger_with_wide_contexts_copies_and_one_with_narrow_contexts_does_not():
    marked, copied = np.random.default_rng(3).integers(0, 60, (10, 300)), {}
    for width in (1, 4):
        learnt = spoofing.learn(marked, marked[:1], width=width)
        copied[width] = spoofing.longest_copy(spoofing.forge(learnt, num_tokens=200, seed=0), marked)
    assert copied[1] < 20 and copied[4] > 60
