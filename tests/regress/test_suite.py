"""Suites: what cannot work as it is written is refused before anything runs."""

import pydantic
import pytest

from jaxbench.regress.suite import Suite

CASES = [{"name": "decode", "workload": "generation"}, {"name": "bits", "workload": "quality"}]


def test_one_launch_confirms_nothing_and_is_refused():
    with pytest.raises(pydantic.ValidationError, match="confirm=1 launch confirms nothing; wanted 2 at least, or 0"):
        Suite(cases=CASES, confirm=1)
    assert [Suite(cases=CASES, confirm=count).confirm for count in (0, 2)] == [0, 2]
