"""Learning rates by step."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxbench.training import schedules
from jaxbench.training.schedules import ScheduleConfig


def rates(steps=100, **how):
    config = ScheduleConfig(**how)
    return [schedules.learning_rate(config, step, peak=2.0, steps=steps) for step in range(steps)]


def test_warm_up_rises_linearly_and_reaches_the_peak_after_it():
    found = rates(kind="constant", warmup_steps=4)
    assert found[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_final_fraction():
    found = rates(kind="cosine", final_fraction=0.1)
    assert found[0] == 2.0 and found[50] == pytest.approx(1.1)
    assert found[25] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedules.learning_rate(ScheduleConfig(), 100, peak=2.0, steps=100) == pytest.approx(0.2)


def test_linear_falls_evenly():
    found = rates(kind="linear", final_fraction=0.0, warmup_steps=20)
    assert found[20] == 2.0 and found[60] == pytest.approx(1.0) and found[99] == pytest.approx(2.0 / 80)


def test_wsd_is_flat_until_its_last_part():
    found = rates(kind="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.0)
    assert set(found[10:81]) == {2.0} and found[90] == pytest.approx(1.0)
    assert rates(kind="wsd")[:91] == [2.0] * 91 and rates(kind="wsd")[95] < 2.0


def test_the_relative_step_is_the_inverse_root_under_the_peak():
    found = rates(kind="relative")
    assert found[0] == 1.0 and found[3] == 0.5 and found[99] == 0.1
    assert schedules.learning_rate(ScheduleConfig(kind="relative"), 0, peak=0.01, steps=9) == 0.01


@given(st.sampled_from(["cosine", "linear", "wsd"]), st.integers(0, 50), st.floats(0, 1))
def test_every_schedule_rises_then_falls_inside_its_bounds(kind, warmup, final):
    found = rates(kind=kind, warmup_steps=warmup, final_fraction=final)
    top = found.index(max(found))
    assert max(found) == 2.0 and all(a <= b for a, b in zip(found[:top], found[1 : top + 1]))
    assert all(a >= b - 1e-12 for a, b in zip(found[top:], found[top + 1 :])) and found[-1] >= 2.0 * final - 1e-12


@pytest.mark.parametrize("kind", ["constant", "relative"])
@pytest.mark.parametrize("idle", [{"decay_steps": 5}, {"final_fraction": 0.0}])
def test_a_decay_is_refused_where_there_is_none(kind, idle):
    (name,) = idle
    with pytest.raises(ValueError, match=f"kind={kind} has no decay, so {name}={idle[name]} does nothing"):
        ScheduleConfig(kind=kind, **idle)
    written = ScheduleConfig(kind=kind).model_dump()  # a run's config.yaml names every setting
    assert ScheduleConfig(**written).model_dump() == written


@pytest.mark.parametrize("how", [{"warmup_steps": 101}, {"kind": "wsd", "warmup_steps": 60, "decay_steps": 50}])
def test_parts_longer_than_the_run_are_refused(how):
    with pytest.raises(ValueError, match="do not fit in steps=100"):
        rates(**how)


def test_the_peak_scales_with_the_batch():
    assert schedules.scaled_peak(0.1, "linear", batch=64, base_batch=16) == pytest.approx(0.4)
    assert schedules.scaled_peak(0.1, "sqrt", batch=64, base_batch=16) == pytest.approx(0.2)
    assert schedules.scaled_peak(0.1, "none", batch=64, base_batch=None) == 0.1
    with pytest.raises(ValueError, match="linear with base_batch=None; wanted the rows"):
        schedules.scaled_peak(0.1, "linear", batch=64, base_batch=None)
