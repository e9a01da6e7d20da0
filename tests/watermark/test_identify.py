"""Identification holds its family-wise rate, names the right candidate, and decodes payloads."""

from __future__ import annotations

import numpy as np
import pytest

from jaxbench.watermark import definition, identify, pipeline
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

VOCAB = 211


def candidates() -> list[identify.Candidate]:
    kinds = {"kgw": parse_scheme("kgw"), "gumbel": parse_scheme({"scheme": "gumbel", "context": {"width": 1}})}
    return [identify.Candidate(f"{name}/{k}", scheme, Key(99 + k)) for name, scheme in kinds.items() for k in range(3)]


def write(candidate: identify.Candidate, length: int, seed: int, payload: int = 0) -> list[int]:
    """Return a text marked with a scheme of width 1: of eight random tokens, the one that speaks most for the mark."""
    scheme, key = candidate.scheme, candidate.key
    random, text = np.random.default_rng(seed), [1]
    while len(text) < length:
        context = np.array([text[-1:]])
        words = definition.vocabulary_words(scheme, key, context, vocab_size=VOCAB, payload=payload)[0]
        options = random.integers(0, VOCAB, 8)
        best = options[np.argmin(words[options]) if scheme.scheme == "kgw" else np.argmax(words[options])]
        text.append(int(best))
    return text


@pytest.mark.parametrize("correction", ["holm", "bonferroni"])
def test_the_scheme_and_key_of_each_text_are_named(correction):
    family = candidates()
    ids = Ragged.from_lists([write(one, 40, seed) for seed, one in enumerate(family)])
    found = identify.identify(
        family, ids, vocab_size=VOCAB, make_detector=pipeline.NumpyDetector, correction=correction
    )
    assert found.best.tolist() == list(range(6)) and found.names[0] == "kgw/0"
    assert (found.accepted(1e-3) == np.eye(6, dtype=bool)).all()
    np.testing.assert_allclose(found.p_value, np.minimum(1, 6 * found.p_values.min(axis=1)))


def test_texts_without_a_mark_are_accused_at_most_at_the_level():
    tokens = np.random.default_rng(1).zipf(1.3, (500, 40)) % VOCAB
    found = identify.identify(
        candidates(), Ragged.from_array(tokens), vocab_size=VOCAB, make_detector=pipeline.NumpyDetector
    )
    rate = found.accepted(0.1).any(axis=1).mean()
    assert 0 < rate <= 0.1 + 3 * np.sqrt(0.09 / 500)
    assert ((found.p_value <= 0.1) == found.accepted(0.1).any(axis=1)).all()


def test_a_payload_is_decoded_among_all_and_its_p_is_corrected():
    one = identify.Candidate("kgw", parse_scheme({"scheme": "kgw", "payload_bits": 6}), Key(3))
    detector = pipeline.NumpyDetector(one.scheme, vocab_size=VOCAB)
    texts = [write(one, 60, seed, payload) for seed, payload in enumerate((0, 17, 63))]
    found = identify.decode_payload(detector, Ragged.from_lists(texts), one.key)
    assert found.payload.tolist() == [0, 17, 63]
    for row, payload in enumerate((0, 17, 63)):
        single = pipeline.detect(detector, Ragged.from_lists(texts[row : row + 1]), one.key, payload=payload)
        assert found.p_value[row] == pytest.approx(64 * single.p_value[0], rel=1e-6)
        assert found.num_scored[row] == single.num_scored[0]
    everything = identify.identify(
        [one], Ragged.from_lists(texts), vocab_size=VOCAB, make_detector=pipeline.NumpyDetector
    )
    assert (everything.p_value == found.p_value).all()


def test_a_text_without_a_payload_is_accused_at_most_at_the_level():
    scheme = parse_scheme({"scheme": "kgw", "payload_bits": 4})
    tokens = np.random.default_rng(2).integers(0, VOCAB, (300, 30))
    found = identify.decode_payload(pipeline.NumpyDetector(scheme, vocab_size=VOCAB), Ragged.from_array(tokens), Key(5))
    assert (found.p_value <= 0.2).mean() <= 0.2 + 3 * np.sqrt(0.16 / 300)


def test_bad_families_are_named():
    ids, make = Ragged.from_lists([[1, 2]]), pipeline.NumpyDetector
    with pytest.raises(ValueError, match=r"candidates \(\)"):
        identify.identify([], ids, vocab_size=VOCAB, make_detector=make)
    with pytest.raises(ValueError, match="no name twice"):
        identify.identify([candidates()[0]] * 2, ids, vocab_size=VOCAB, make_detector=make)
    with pytest.raises(ValueError, match="correction='none'"):
        identify.identify(candidates(), ids, vocab_size=VOCAB, make_detector=make, correction="none")
    with pytest.raises(ValueError, match="scheme kgw has 1 payloads"):
        identify.decode_payload(make(parse_scheme("kgw"), vocab_size=VOCAB), ids, Key(1))
