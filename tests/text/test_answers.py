"""Answers beside right ones: normalization, exact match, F1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.text import answers

TEXTS = st.text("aZ the,. 1'\n", max_size=30)


@pytest.mark.parametrize(
    "answer, right, exact, f1",
    [
        ("The Mill!", ["the mill"], 1.0, 1.0),
        ("an old mill", ["mill"], 0.0, 2 / 3),
        ("by a river mill", ["the mill by the river"], 0.0, 1.0),  # order does not count in F1
        ("miller", ["mill"], 0.0, 0.0),
        ("1712", ["in 1712", "1712"], 1.0, 1.0),
        ("", [], 1.0, 1.0),
        ("mill", [], 0.0, 0.0),
        ("mill mill", ["mill"], 0.0, 2 / 3),
        ("", ["The", "mill"], 0.0, 0.0),  # of "The" nothing is left, which makes no answer none
        ("...", ["a"], 1.0, 1.0),
    ],
)
def test_answers_are_counted_as_squad_counts_them(answer, right, exact, f1):
    assert answers.exact_match(answer, right) == exact
    assert answers.f1(answer, right) == pytest.approx(f1)


@given(answer=TEXTS, right=st.lists(TEXTS, max_size=3))
def test_f1_lies_between_exact_match_and_one_and_normalizing_twice_changes_nothing(answer, right):
    assert answers.exact_match(answer, right) <= answers.f1(answer, right) <= 1
    once = answers.normalized(answer)
    assert answers.normalized(once) == once


@given(answer=TEXTS, right=TEXTS)
def test_f1_does_not_care_which_of_two_is_the_answer(answer, right):
    assert answers.f1(answer, [right]) == pytest.approx(answers.f1(right, [answer]))
