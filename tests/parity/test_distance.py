"""The one distance: its definition, its floor for tensors that should be zero, and the error-ratio gate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.parity import distance

FINITE = st.floats(-1e6, 1e6, allow_nan=False, width=64)
VECTORS = st.lists(FINITE, min_size=1, max_size=8).map(np.array)


@given(VECTORS)
def test_a_tensor_is_at_distance_zero_from_itself(value):
    assert distance.relative_error(value, value.copy()) == 0.0


@given(VECTORS, st.floats(1e-3, 1e3))
def test_distance_does_not_change_when_both_tensors_are_scaled(value, factor):
    shifted = value + 1.0
    expected = distance.relative_error(shifted, value)
    measured = distance.relative_error(shifted * factor, value * factor)
    assert measured == pytest.approx(expected, rel=1e-6)


@given(VECTORS, VECTORS)
def test_distance_is_the_norm_of_the_difference_over_the_norm_of_the_reference(value, reference):
    size = min(len(value), len(reference))
    value, reference = value[:size], reference[:size]
    expected = np.sqrt(sum((a - b) ** 2 for a, b in zip(value, reference, strict=True)))
    scale = np.sqrt(sum(b * b for b in reference))
    if scale > 1e-100 and expected > 1e-100:
        assert distance.relative_error(value, reference) == pytest.approx(expected / scale, rel=1e-9)


def test_noise_on_a_gradient_that_is_exactly_zero_passes_beside_larger_ones():
    reference = {"kernel": np.full(100, 1.0), "key_bias": np.zeros(4)}
    values = {"kernel": np.full(100, 1.0), "key_bias": np.full(4, 1e-15)}
    result = distance.compare(values, reference, kind="gradient")
    assert result.passed
    # RMS of the norms 10 and 0 is 10 / sqrt(2); the noise's norm is 2e-15.
    assert result.entries[1].error == pytest.approx(2e-15 / (1e-3 * 10 / np.sqrt(2)))


def test_the_worst_tensor_is_named():
    reference = {"a": np.ones((2, 3)), "b": np.ones((2, 3))}
    wrong = np.ones((2, 3))
    wrong[1, 2] = 1.5
    result = distance.compare({"a": np.ones((2, 3)), "b": wrong}, reference, kind="output")
    assert not result.passed
    assert result.worst.name == result.first_failure.name == "b"


def test_the_first_failure_follows_the_order_of_computation_not_the_size_of_the_error():
    reference = {"early": np.ones(4), "late": np.ones(4)}
    values = {"late": np.full(4, 9.0), "early": np.full(4, 1.0 + 1e-6)}
    result = distance.compare(values, reference, kind="output")
    assert result.first_failure.name == "early" and result.worst.name == "late"


@pytest.mark.parametrize("bad", [np.array([1.0, np.nan]), np.array([1.0, np.inf]), np.array([1.0])])
def test_values_that_are_not_finite_or_misshapen_never_pass(bad):
    result = distance.compare({"x": bad}, {"x": np.array([1.0, 1.0])}, kind="output", tolerance=1e300)
    assert not result.passed


def test_a_nan_on_both_sides_does_not_pass():
    both = {"x": np.array([np.nan])}
    assert not distance.compare(both, both, kind="output").passed


@pytest.mark.parametrize("how", [{}, {"is_single_draw": True}], ids=["twins", "pair"])
def test_an_error_ratio_of_two_sides_that_are_not_finite_does_not_pass(how):
    broken, exact = {"x": np.array([1.0, np.nan])}, {"x": np.array([1.0, 2.0])}
    how |= {"kind": "outputs", "dtype": "bfloat16", "slack_epsilons": 1.0}
    assert distance.compare_errors(exact, exact, exact, **how).passed
    for values, others in ((broken, broken), (broken, exact), (exact, broken)):
        assert not distance.compare_errors(values, others, exact, **how).passed
        assert not distance.averaged([distance.compare_errors(values, others, exact, **how)]).passed


@pytest.mark.parametrize("huge", [np.inf, -np.inf, np.finfo(float).min])
def test_equal_infinities_are_left_out_and_those_of_one_side_never_pass(huge):
    reference, off = np.array([1.0, huge, 2.0]), np.array([1.0, huge, 2.0 + 1e-3])
    assert distance.relative_error(reference.copy(), reference) == 0.0
    assert distance.relative_error(off, reference) == pytest.approx(1e-3 / np.sqrt(5))
    assert distance.norm_floor({"x": reference}) == pytest.approx(1e-3 * np.sqrt(5))
    for value in (np.array([1.0, 0.0, 2.0]), np.array([1.0, -huge, 2.0]), np.array([huge, huge, 2.0])):
        assert distance.relative_error(value, reference) == distance.relative_error(reference, value) == np.inf
    masked = {"x": np.array([1.0, huge])}
    how = {"kind": "outputs", "dtype": "float32", "slack_epsilons": 1.0}
    assert distance.compare_errors(masked, masked, masked, **how).passed


def test_missing_and_unexpected_names_are_errors_that_list_them():
    with pytest.raises(ValueError, match=r"gradient: missing \['b'\], unexpected \['c'\]"):
        distance.compare({"a": np.ones(1), "c": np.ones(1)}, {"a": np.ones(1), "b": np.ones(1)}, kind="gradient")


def test_a_backends_own_repeat_error_widens_its_tolerance():
    values, reference = {"x": np.array([1.0 + 1e-6])}, {"x": np.array([1.0])}
    assert not distance.compare(values, reference, kind="output").passed
    assert distance.compare(values, reference, kind="output", widen={"x": 1e-5}).passed


@given(st.floats(1e-9, 1e-2), st.floats(1.0, 10.0))
def test_error_ratio_gate_passes_up_to_one_and_a_half_either_way(error, ratio):
    reference = {"x": np.ones(16)}
    small, large = {"x": np.full(16, 1.0 + error)}, {"x": np.full(16, 1.0 + error * ratio)}
    for one, other in ((small, large), (large, small)):
        result = distance.compare_errors(one, other, reference, kind="output", dtype="float32", slack_epsilons=0.0)
        if abs(ratio - 1.5) > 1e-4:
            assert result.passed == (ratio < 1.5)


def test_error_ratio_slack_forgives_differences_of_a_few_epsilons():
    reference = {"x": np.ones(4)}
    exact, off = {"x": np.ones(4)}, {"x": np.full(4, 1.0 + 2.0**-23)}
    strict = distance.compare_errors(off, exact, reference, kind="output", dtype="float32", slack_epsilons=0.5)
    loose = distance.compare_errors(off, exact, reference, kind="output", dtype="float32", slack_epsilons=2.0)
    assert not strict.passed and loose.passed
    assert strict.first_failure.name == "x" == strict.worst.name


def _draws(errors, others):
    reference, results = {"x": np.ones(4)}, []
    for error, other in zip(errors, others, strict=True):
        values, other_values = {"x": np.full(4, 1.0 + error)}, {"x": np.full(4, 1.0 + other)}
        results.append(
            distance.compare_errors(
                values, other_values, reference, kind="gradients", dtype="float32", slack_epsilons=1.0
            )
        )
    return results


def test_batches_whose_rounding_errors_differ_either_way_pass_together_and_a_lasting_factor_does_not():
    swapped = _draws((0.01, 0.03, 0.02, 0.01), (0.03, 0.01, 0.01, 0.02))
    assert not any(draw.passed for draw in swapped)
    averaged = distance.averaged(swapped)
    assert averaged.passed and averaged.kind == "gradients"
    assert averaged.worst.error == pytest.approx((0.01 * 0.03 * 0.02 * 0.01) ** 0.25)
    assert not distance.averaged(_draws((0.01, 0.02, 0.03), (0.02, 0.04, 0.06))).passed


def test_a_gradient_that_counts_as_zero_may_hold_rounding_of_the_tensors_around_it():
    reference = {"kernel": np.full(100, 1.0), "key_bias": np.zeros(4)}
    values = {"kernel": np.full(100, 1.0), "key_bias": np.full(4, 1e-8)}
    others = {"kernel": np.full(100, 1.0), "key_bias": np.full(4, 1e-9)}
    how = {"kind": "gradients", "dtype": "float32", "slack_epsilons": 2.0}
    assert distance.compare_errors(values, others, reference, **how).passed
    larger = values | {"key_bias": np.full(4, 1e-5)}
    assert distance.compare_errors(larger, others, reference, **how).first_failure.name == "key_bias"


@pytest.mark.parametrize("mask", [-1e31, float(np.finfo(np.float32).min)])
def test_finite_masks_hide_nothing_and_are_compared_among_themselves(mask):
    reference = np.array([1.0, mask, 2.0])
    assert distance.relative_error(np.array([1.0, mask, 2.001]), reference) == pytest.approx(1e-3 / np.sqrt(5))
    assert distance.relative_error(np.array([1.0, mask * 1.01, 2.0]), reference) == pytest.approx(1e-2)
    for value in (np.array([mask, mask, 2.0]), np.array([1.0, 0.0, 2.0])):
        assert distance.relative_error(value, reference) >= 1.0
    assert distance.norm_floor({"x": reference}) == pytest.approx(1e-3 * np.sqrt(5))


def test_without_a_floor_every_tensor_counts_by_itself():
    reference = {"large": np.full(3, 1e9), "small": np.ones(3)}
    values = reference | {"small": np.full(3, 1.0 + 1e-6)}
    assert distance.compare(values, reference, kind="outputs", tolerance=1e-9).passed
    assert not distance.compare(values, reference, kind="outputs", tolerance=1e-9, has_floor=False).passed


def test_one_draw_of_few_elements_has_more_slack_and_of_many_nearly_none():
    how = {"kind": "outputs", "dtype": "float32", "slack_epsilons": 1.0, "is_single_draw": True}
    errors = {
        1: (4.9, 5.1),
        4: (1.9, 2.1),
        64: (1.05, 1.08),
    }  # epsilons that pass, and that do not, beside an exact one
    for size, epsilons in errors.items():
        exact = {"x": np.ones(size)}
        passed = [
            distance.compare_errors({"x": np.full(size, 1.0 + e * 2.0**-23)}, exact, exact, **how).passed
            for e in epsilons
        ]
        assert passed == [True, False], size
    for size, ratios in {4: (4.6, 4.8), 16: (2.1, 2.3), 64: (1.45, 1.55), 4096: (1.45, 1.55)}.items():
        exact, small = {"x": np.ones(size)}, {"x": np.full(size, 1.01)}
        passed = [
            distance.compare_errors(
                {"x": np.full(size, 1.0 + 0.01 * r)}, small, exact, **how | {"slack_epsilons": 0.0}
            ).passed
            for r in ratios
        ]
        assert passed == [True, False], size


def test_a_mask_that_a_narrow_type_rounds_is_no_error_of_that_type():
    mask = float(np.finfo(np.float32).min)
    reference = {"x": np.array([1.0, mask])}
    how = {"kind": "outputs", "dtype": "bfloat16", "slack_epsilons": 1.0, "is_single_draw": True}
    rounded, infinite = {"x": np.array([1.0, -3.3895e38])}, {"x": np.array([1.0, -np.inf])}
    assert distance.compare_errors(rounded, infinite, reference, **how).passed
    assert not distance.compare_errors({"x": np.array([1.0, 0.0])}, infinite, reference, **how).passed


def test_large_values_hide_no_error_of_small_ones():
    filled, units = np.array([1.0, -1e9, -1e9, 2.0]), np.array([1e5, 2e5, 1e-6])
    assert distance.error_by_size(np.array([1.0, -1e9, -1e9, 2.001]), filled) == pytest.approx(1e-3 / np.sqrt(5))
    assert distance.error_by_size(np.array([1e5, 2e5, 1.1e-6]), units) == pytest.approx(0.1)
    assert distance.error_by_size(np.array([-1e9, 0.5, 0.0]), np.array([-1e9, 0.0, 0.0])) == np.inf
    assert not distance.compare({"x": filled * 1.0001}, {"x": filled}, kind="outputs").passed
    assert distance.error_by_size(filled, filled) == 0.0


def test_what_rounding_of_large_values_leaves_in_small_ones_is_no_error():
    reference = np.array([1.0, 2.0, 0.0, -3.0])
    for rounding in (1e-15, 1e-17):
        off = reference + np.array([2e-16, 0.0, rounding, 0.0])
        assert distance.error_by_size(off, reference) == distance.relative_error(off, reference)
    assert distance.error_by_size(reference + np.array([0.0, 0.0, 1e-10, 0.0]), reference) == np.inf
    random = np.random.default_rng(0).standard_normal(10_000)
    assert distance.error_by_size(random + 1e-12, random) == distance.relative_error(random + 1e-12, random)


def test_the_distance_of_values_whose_squares_are_zero_is_theirs():
    for scale in (1e-160, 1e-200, 1e-300):
        off, reference = np.array([1.001, 2.0]) * scale, np.array([1.0, 2.0]) * scale
        assert distance.relative_error(off, reference) == pytest.approx(1e-3 / np.sqrt(5))
    assert distance.relative_error(np.full(2, 1e-200), np.ones(2)) == pytest.approx(1.0)
    assert distance.relative_error(np.array([1.0, 1e-200]), np.array([1.0, 0.0])) == pytest.approx(1e-200)
