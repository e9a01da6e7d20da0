"""Compatibility with vLLM 0.33's Gumbel watermark; golden/vllm.json comes from vLLM itself (golden/make_vllm.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from jaxbench.watermark import reference, significance
from jaxbench.watermark.config import Gumbel
from jaxbench.watermark.keys import Key
from jaxbench.watermark.reference import ContextRule
from jaxbench.watermark.schemes import gumbel
from tests.watermark import vocabulary

GOLDEN = json.loads((Path(__file__).parent / "golden" / "vllm.json").read_text())
VOCAB_SIZE = 49152


def scheme(**fields) -> Gumbel:
    return Gumbel(prf="vllm", **fields)


def first_contexts(tokens: list[int]) -> np.ndarray:
    """Return where a context of four occurs for the first time: what vLLM's detector scores."""
    padded, seen, first = [-1] * 4 + tokens, set(), []
    for place in range(len(tokens)):
        context = tuple(padded[place : place + 4])
        first.append(context not in seen)
        seen.add(context)
    return np.array([first])


def detect(row: dict, *, by_context: bool) -> significance.Detections:
    fields = {} if row["alpha"] is None else {"dual_key_alpha": row["alpha"]}
    tokens = np.array([row["tokens"]])
    lengths = np.array([tokens.shape[1]])
    found = reference.evidence(scheme(**fields), Key(row["key"]), tokens, lengths, vocab_size=VOCAB_SIZE)
    if by_context:
        found = found._replace(scored=first_contexts(row["tokens"]))
    return significance.score(scheme(**fields), found, vocab_size=VOCAB_SIZE)


def vllms_p_value(found: significance.Detections, alpha: float | None) -> float:
    """Return the tail of one gamma; with two keys, of the one whose mean and variance are those of the sum."""
    share = 1.0 if alpha is None else (1 - alpha) ** 2 + alpha**2
    return special.gammaincc(found.num_scored[0] / share, found.statistic[0] / share)


@pytest.mark.parametrize(
    ("context", "token", "word"),
    [
        ((-1, -1, -1, -1), 0, 4197411589),
        ((-1, -1, -1, 17), 5, 939783375),
        ((1, 2, 3, 4), 49151, 795078009),
        ((1, 2, 3, 4), 49150, 2912731805),
    ],
)
def test_words_are_the_known_answers(context, token, word):
    key = reference.halves(Key(42), 1)
    found = gumbel.vllm_token_words(gumbel.vllm_state(np.array([context]), key), np.array([token]), key)
    assert found.tolist() == [word]


@pytest.mark.parametrize("row", GOLDEN["uniforms"], ids=lambda row: f"width{len(row['contexts'][0])}")
def test_uniforms_are_those_of_vllm_for_every_width(row):
    key = reference.halves(Key(row["key"]), 1)
    words = gumbel.vllm_token_words(gumbel.vllm_state(np.array(row["contexts"]), key), np.array(row["tokens"]), key)
    wanted = np.array(row["uniforms"], np.float32)  # vLLM rounds the same float64 to float32
    assert np.array_equal(scheme().shade(words).astype(np.float32), wanted)


def test_words_of_a_whole_vocabulary_are_the_words_of_its_tokens():
    contexts = np.array([[-1, -1, 3, 9], [7, 7, 7, 7]])
    words = vocabulary.words(scheme(), Key(42), contexts, vocab_size=41)
    key = reference.halves(Key(42), 1)
    for token in (0, 1, 39, 40):
        one = gumbel.vllm_token_words(gumbel.vllm_state(contexts, key), np.full(2, token), key)
        assert np.array_equal(words[:, token], one)


def test_the_draw_is_the_draw_of_vllm():
    tokens = np.arange(499)
    logits = (tokens * tokens * 37 % 101) / 25
    for row in GOLDEN["samples"]:
        words = vocabulary.words(scheme(), Key(row["key"]), np.array(row["contexts"]), vocab_size=499)
        drawn = np.argmax(logits - np.log(-np.log(scheme().shade(words))), axis=1)
        assert drawn.tolist() == row["tokens"]


@pytest.mark.parametrize("row", GOLDEN["detections"], ids=lambda row: f"alpha{row['alpha']}-{len(row['tokens'])}")
def test_scores_and_p_values_are_those_of_vllms_detector(row):
    found = detect(row, by_context=True)
    assert found.num_scored.tolist() == [row["num_scored"]]
    assert found.statistic[0] == pytest.approx(row["score"], rel=1e-6)  # vLLM's uniforms are float32
    theirs = vllms_p_value(found, row["alpha"])
    assert theirs == pytest.approx(row["p_value"], rel=2e-5)
    if row["alpha"] is None:
        assert found.p_value[0] == pytest.approx(theirs, rel=1e-12)


def test_texts_that_vllm_marked_are_detected_and_others_are_not():
    for row in GOLDEN["detections"]:
        found = detect(row, by_context=False)
        if row["alpha"] is None:
            assert (found.p_value[0] < 1e-6) == (row["p_value"] < 1e-6)
    assert sum(row["p_value"] < 1e-6 for row in GOLDEN["detections"] if row["alpha"] is None) == 3


def test_the_first_token_of_a_text_is_scored():
    row = {"key": 42, "alpha": None, "tokens": [5]}
    assert detect(row, by_context=False).num_scored.tolist() == [1]


def test_another_context_width_is_another_function():
    tokens, lengths = np.array([[3, 1, 4, 1, 5]]), np.array([5])
    narrow = scheme(context=ContextRule(kind="left", width=2))
    words = [reference.evidence(s, Key(42), tokens, lengths, vocab_size=VOCAB_SIZE).words for s in (scheme(), narrow)]
    assert not np.array_equal(*words)
