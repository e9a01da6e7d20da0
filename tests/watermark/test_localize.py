"""Marked spans are found where they are; without a mark, spans stay within their error rate."""

from __future__ import annotations

import numpy as np
import pytest

from jaxbench.watermark import localize, reference, significance
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.reference import Evidence

VOCAB = 5000
KGW = parse_scheme("kgw")


def uniform_words(rows: int, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (rows, length), dtype=np.uint32)


def marked(rows: int, length: int, start: int, end: int, seed: int) -> Evidence:
    """Return evidence of texts whose tokens start..end-1 are mostly green."""
    words = uniform_words(rows, length, seed)
    green = np.random.default_rng(seed + 1).random((rows, end - start)) < 0.7
    words[:, start:end][green] >>= 2
    return Evidence(words, np.ones(words.shape, bool))


def test_a_marked_passage_in_a_long_text_is_found_where_it_is():
    evidence = marked(20, 800, 300, 380, seed=0)
    whole = significance.score(KGW, evidence, vocab_size=VOCAB)
    found = localize.localize(KGW, evidence, vocab_size=VOCAB)
    assert np.median([one.p_value for one in found]) < 1e-3 * np.median(whole.p_value)
    hits = [one.spans for one in found if one.spans]
    assert len(hits) >= 19
    for spans in hits:
        inside = sum(max(0, min(span.end, 380) - max(span.start, 300)) for span in spans)
        assert inside >= 40 and sum(span.end - span.start for span in spans) <= 160
        assert all(span.p_value <= localize.LEVEL for span in spans)
        assert all(one.end <= other.start for one, other in zip(spans, spans[1:]))


@pytest.mark.parametrize("scheme", ["kgw", "gumbel", "unigram", "synthid"])
def test_texts_without_a_mark_have_spans_at_most_at_the_level(scheme):
    scheme = parse_scheme(scheme)
    words = uniform_words(400, 120, seed=3)
    if scheme.scheme == "unigram":
        words = np.where(words < 2**31, 0, reference.RED).astype(np.uint32)
    evidence = Evidence(words, np.ones(words.shape, bool))
    found = localize.localize(scheme, evidence, vocab_size=VOCAB, level=0.05)
    assert np.mean([one.p_value <= 0.05 for one in found]) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    assert all((one.p_value <= 0.05) == bool(one.spans) for one in found)


def test_spans_are_in_places_of_the_text_and_skip_what_is_not_scored():
    evidence = marked(1, 300, 0, 300, seed=4)
    scored = np.zeros((1, 300), bool)
    scored[0, 100:] = True
    found = localize.localize(KGW, Evidence(evidence.words, scored), vocab_size=VOCAB)[0]
    assert min(span.start for span in found.spans) >= 100
    assert sum(span.num_scored for span in found.spans) >= 150
    assert localize.localize(KGW, Evidence(evidence.words, ~scored & scored), vocab_size=VOCAB)[0] == (1.0, ())


def test_bad_settings_are_named():
    evidence = marked(1, 30, 0, 9, seed=1)
    with pytest.raises(ValueError, match=r"sizes=\(\)"):
        localize.localize(KGW, evidence, vocab_size=VOCAB, sizes=())
    with pytest.raises(ValueError, match="level=1.5"):
        localize.localize(KGW, evidence, vocab_size=VOCAB, level=1.5)
