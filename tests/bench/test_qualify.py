"""False alarms and power of an arm against itself, from records whose truth is known."""

import numpy as np
import pytest

from jaxbench.bench import qualify
from jaxbench.bench.suite import Verdicts
from jaxbench.measure.records import Record, Workload


def twice(sd: float, *, launches: int, rows: int = 8, seed: int = 0) -> list[Record]:
    """Records of an arm and the same again, whose launches differ by `sd`."""
    generator, found = np.random.default_rng(seed), []
    for n in range(launches):
        for row in range(rows):
            load = Workload(kind="decode", dtype="float32", batch=row + 1)
            for arm in ("flax", "flax_again"):
                rate = float(100 * np.exp(generator.normal(0, sd / np.sqrt(2))))
                found.append(
                    Record(metric="decode_tokens_per_s", arm=arm, workload=load, launch=n, value=rate, samples=(rate,))
                )
    return found


def test_arms_that_differ_by_chance_have_few_false_verdicts_and_quarters_are_found():
    found = qualify.qualify(twice(0.06, launches=50), Verdicts(baseline="flax"), num_drawn=200)
    assert found.real.total == 10 and found.real.count <= 2
    assert found.drawn.count / found.drawn.total < 0.1
    assert found.power[1.25].count / found.power[1.25].total > 0.95
    assert found.power[1.05].count < found.power[1.25].count
    assert all(0.03 < deviation < 0.09 for deviation in found.rows.values())
    assert all(1.05 < least < 1.4 for least in found.decidable.values())


def test_an_arm_that_is_really_slower_the_second_time_shows():
    found = twice(0.03, launches=20)
    slower = [r.model_copy(update={"samples": (r.samples[0] * 0.8,)}) if r.arm == "flax_again" else r for r in found]
    assert qualify.qualify(slower, Verdicts(baseline="flax"), num_drawn=2).real.count == 4


@pytest.mark.parametrize(
    ("launches", "arm", "message"), [(9, "flax_again", "9 launches, wanted at least 10"), (10, "equinox", "no arm ran")]
)
def test_what_cannot_be_qualified_is_named(launches, arm, message):
    records = [
        r.model_copy(update={"arm": arm}) if r.arm != "flax" else r for r in twice(0.05, launches=launches, rows=2)
    ]
    with pytest.raises(ValueError, match=message):
        qualify.qualify(records, Verdicts(baseline="flax"))
