"""Oracles: what all backends share agrees with answers from outside, and they cover what they should."""

import importlib
import typing

import pytest

from jaxbench.config import RotaryScaling
from jaxbench.parity import cases, mutation, run
from jaxbench.parity.oracles import rotary, schedules
from jaxbench.training.schedules import ScheduleConfig

ORACLES = [case.id for case in cases.CASES if case.id.startswith("oracle/")]


@pytest.mark.parametrize("case_id", ORACLES)
def test_what_all_backends_share_agrees_with_answers_from_outside(case_id):
    found = run.run(cases.find(case_id))
    assert [gate for gate in found["gates"] if not gate["passed"]] == []
    assert {gate["id"] for gate in found["gates"]} == {"P11"} and all(gate["note"] for gate in found["gates"])


@pytest.mark.parametrize("case_id", ORACLES)
def test_every_oracle_has_bugs_that_it_must_catch(case_id):
    assert sum(bug.case == case_id and bug.side == "shared" for bug in mutation.MUTATIONS) >= 3
    assert importlib.import_module(f"jaxbench.parity.{cases.find(case_id).exact}").__doc__


def test_a_factor_in_the_shared_frequencies_passes_between_the_twins_and_fails_at_the_oracle():
    [bug] = [bug for bug in mutation.MUTATIONS if bug.name == "rotary-frequencies-times-1.5"]
    with bug.injected():
        twins = run.run(cases.find("transformer/llama-grouped"), quick=True)
        oracle = run.run(cases.find("oracle/rotary"))
    assert twins["passed"] and twins["worst"] < 1e-14
    assert not oracle["passed"] and all(gate["error"] > 0.3 for gate in oracle["gates"])


def test_every_scaling_and_every_schedule_has_an_oracle():
    kinds = typing.get_args(RotaryScaling.model_fields["kind"].annotation)
    assert {settings["rope_type"] for _, settings in rotary.SCALINGS.values()} == {"default", *kinds}
    assert set(schedules.THEIRS) == set(typing.get_args(ScheduleConfig.model_fields["kind"].annotation))
