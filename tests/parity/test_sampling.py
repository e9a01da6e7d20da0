"""Sampling beside transformers' own processors, and the settings that the cases draw with."""

import numpy as np
import pytest

from jaxbench.parity import cases, evidence, run, sampling, torch_side
from jaxbench.prompts import SamplingParams


def test_filters_and_penalties_are_those_of_transformers_and_draws_those_of_the_twin():
    found = run.run(cases.find("sample/filters"))
    assert [gate for gate in found["gates"] if not gate["passed"]] == []
    assert {gate["id"] for gate in found["gates"]} == {"P6", "P11"}


def test_every_filter_of_the_cases_settings_removes_tokens_and_the_penalty_changes_logits_of_both_signs():
    given = sampling.inputs(vocab_size=sampling.VOCAB, spread=2.5)
    for name, settings in sampling.SETTINGS.items():
        kept = np.isfinite(sampling.by_transformers(settings, given)).sum(axis=1)
        assert (kept == sampling.VOCAB).all() == (name in ("temperature", "penalty"))
        assert (kept < sampling.VOCAB).mean() in (0.0, 1.0)
    row = np.array([[2.0, -2.0, 1.0, -1.0]])
    one = sampling.Inputs(row, np.array([[0, 1, 2]], np.int32), np.array([2], np.int32))
    penalised = sampling.by_transformers(SamplingParams(temperature=1.0, repetition_penalty=2.0), one)
    np.testing.assert_array_equal(penalised, [[1.0, -4.0, 1.0, -1.0]])


@pytest.mark.parametrize("left_out", ["repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"])
def test_each_penalty_and_the_biases_change_logits_of_the_case_that_compares_them(left_out):
    given = sampling.inputs(vocab_size=sampling.VOCAB, spread=2.5)
    given = given._replace(lengths=np.maximum(given.lengths, sampling.STEP + 1))
    neutral = SamplingParams(temperature=1.0)._asdict()[left_out]
    found = [
        sampling.by_hand(each, given, step=sampling.STEP)
        for each in (sampling.ADDED, sampling.ADDED._replace(**{left_out: neutral}))
    ]
    assert (found[0] != found[1]).any(axis=1).all()
    row = sampling.Inputs(np.array([[2.0, -2.0, 1.0]]), np.array([[0, 1, 1, 2]], np.int32), np.array([3], np.int32))
    how = SamplingParams(
        temperature=1.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((0, 3.0),)
    )
    np.testing.assert_array_equal(sampling.by_hand(how, row, step=2), [[4.0, -5.25, 1.0]])


def test_some_rows_of_the_case_with_an_end_token_end_and_others_do_not():
    case = cases.find("transformer/gpt2")
    config, params = cases.load(case)
    with run.pinned("float64"):
        side = torch_side.Side(case, config, params, dtype="float64")
        batches = evidence.prompts_of(case, cases.arrays(case, config))
        drawn = side.sample(batches, evidence.SAMPLING, max_new_tokens=evidence.NUM_SAMPLED, seed=evidence.SEED)
    assert [len({len(prompt) for prompt in batch}) for batch in batches] == [2, 1]
    lengths = (drawn >= 0).sum(axis=1).tolist()
    assert len(set(lengths)) == 3 and max(lengths) == evidence.NUM_SAMPLED


@pytest.mark.parametrize("left_out", sorted(evidence.SAMPLING))
def test_leaving_out_any_setting_changes_the_tokens_that_a_case_draws(left_out):
    case = cases.find("transformer/llama-grouped")
    config, params = cases.load(case)
    with run.pinned("float64"):
        side = torch_side.Side(case, config, params, dtype="float64")
        prompts = [row[: case.prompt].tolist() for row in cases.arrays(case, config).tokens]
        neutral = SamplingParams(temperature=1.0)._asdict()[left_out]
        drawn = [
            side.sample([prompts], settings, max_new_tokens=evidence.NUM_SAMPLED, seed=evidence.SEED)
            for settings in (evidence.SAMPLING, evidence.SAMPLING | {left_out: neutral})
        ]
    assert (drawn[0] != drawn[1]).any()
