"""Blame and causes are tested by injecting bugs into the JAX side of three pairs."""

import pytest

from tests.pair import bugs

pytestmark = pytest.mark.timeout(900)
ALL = [(pair, bug) for pair, (_, table) in bugs.PAIRS.items() for bug in table]


@pytest.mark.parametrize("pair", bugs.PAIRS)
def test_a_pair_without_a_bug_is_the_same_function(pair):
    result = bugs.outcome(pair, "")
    assert result.passed and not result.blamed and not result.causes


def test_every_injected_bug_is_caught_and_the_module_that_has_it_is_blamed():
    missed, wrong = [], []
    for pair, bug in ALL:
        result = bugs.outcome(pair, bug.name)
        blamed = {entry.module.partition("#")[0] for entry in result.blamed}
        missed += [(pair, bug.name)] if result.passed else []
        wrong += [] if bug.module in blamed else [(pair, bug.name, sorted(blamed))]
    assert missed == []
    assert wrong == []


def test_known_kinds_of_bugs_are_named():
    unnamed = []
    for pair, bug in ALL:
        causes = bugs.outcome(pair, bug.name).causes
        if bug.cause and not any(bug.cause in words for words in causes.values()):
            unnamed.append((pair, bug.name, causes))
    assert len(unnamed) <= 0.1 * len(ALL), unnamed
