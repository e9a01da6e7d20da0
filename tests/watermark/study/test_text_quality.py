"""Variety and endings by hand."""

import math

from jaxbench.watermark.study import text_quality


def test_distinct_counts_each_n_gram_once():
    assert text_quality.distinct("a b a b a".split(), 1) == 2 / 5
    assert text_quality.distinct("a b a b a".split(), 2) == 2 / 4
    assert math.isnan(text_quality.distinct(["a"], 2))


def test_variety_sees_repetition_and_ignores_case():
    loop = text_quality.variety("We go on AND ON we go on and on")
    assert loop.num_words == 10 and loop.distinct_1 == 4 / 10
    assert loop.repetition == 2 / 7  # "we go on and", "go on and on" come twice
    assert text_quality.variety("one two three four five").repetition == 0
    assert math.isnan(text_quality.variety("").distinct_1)


def test_a_cap_hit_is_a_text_that_did_not_end_by_itself():
    found = text_quality.ending([10, 10, 4], limit=10, has_ended=[True, False, True])
    assert found == {"mean_tokens": 8.0, "cap_hits": 1 / 3}
    assert math.isnan(text_quality.ending([], limit=5, has_ended=[])["mean_tokens"])
