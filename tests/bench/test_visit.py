"""Visits: samples by time, stalls made again, warm-up read from the samples."""

import pytest

from jaxbench.bench import visit


class Clockwork:
    """A control loop whose readings are given, a calm one where they end."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def is_calm(self):
        return self.readings.pop(0) if self.readings else True


def sampler(values):
    left = iter(values)
    return lambda: next(left)


def test_a_visit_of_no_time_has_one_sample_and_a_long_one_stops_at_its_most():
    assert visit.visit(sampler([{"step_s": 1.0}] * 3), Clockwork(), sample_s=0)[:2] == ([{"step_s": 1.0}], 0)
    long = visit.visit(sampler([{"step_s": 1.0}] * 99), Clockwork(), sample_s=1e9)
    assert len(long.answers) == visit.MOST_SAMPLES


def test_a_visit_in_which_the_machine_stalled_is_made_again_and_its_samples_are_not_used():
    answers = [{"step_s": 9.0}, {"step_s": 1.0}, {"step_s": 2.0}]
    for readings in ([False], [False, False]):  # the last one counts whatever happened
        made = visit.visit(sampler(answers), Clockwork(*readings), sample_s=0)
        assert (made.answers, made.repeats) == ([{"step_s": 1.0}], 1)


def test_a_failed_sample_ends_the_visit_and_keeps_those_before():
    assert visit.visit(sampler([{"step_s": 1.0}, None, {"step_s": 3.0}]), Clockwork(), sample_s=1e9)[:2] == (
        [{"step_s": 1.0}],
        0,
    )


@pytest.mark.parametrize(
    ("seconds", "dropped"),
    [
        ([2.0, 1.5, 1.0, 1.0, 1.0], 2), ([1.0, 1.0, 1.0], 0), ([1.05, 1.0, 1.0], 0), ([5.0], 0), ([5.0, 1.0], 1),
        ([9.0, 8.0, 7.0, 1.0], 2), ([1.0, 1.0, 9.0, 1.0], 0),
    ],
)  # fmt: skip
def test_first_samples_are_warm_up_while_they_are_slower_than_the_rest(seconds, dropped):
    assert visit.settled(seconds) == dropped


def test_the_control_loop_is_calm_on_its_first_reading_and_not_when_it_was_far_faster_before():
    control = visit.Control(0.25)
    assert control.is_calm()
    control.seconds = [1e-9]
    assert not control.is_calm(repeats=2)
    assert len(control.seconds) == 2
