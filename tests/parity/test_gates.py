"""The gates on hand-made results: each passes what it should and names the place where it fails."""

import numpy as np
import pytest

from jaxbench.parity import capture, distance, gates


class FakeSide:
    """A side that holds parameters, strictly unless told otherwise."""

    def __init__(self, name, params, *, strict=True, damage=lambda params: params):
        self.name, self.params, self.strict, self.damage = name, dict(params), strict, damage

    def get_params(self):
        return dict(self.params)

    def load_params(self, params):
        shapes = {name: value.shape for name, value in params.items()}
        expected = {name: value.shape for name, value in self.params.items()}
        if self.strict and shapes != expected:
            raise ValueError(f"do not fit: {sorted(set(shapes.items()) ^ set(expected.items()))}")
        self.params = self.damage({name: value for name, value in params.items() if name in self.params})


@pytest.fixture
def params():
    return {"a.kernel": np.arange(6.0).reshape(2, 3), "b.scale": np.array([1.5, 0.5])}


def test_conversion_passes_where_weights_survive_the_round_trip_and_wrong_sets_are_refused(params):
    results = gates.conversion(FakeSide("one", params), FakeSide("other", params), params)
    assert [gate.passed for gate in results] == [True, True]


def test_conversion_names_the_tensor_that_a_side_changes(params):
    def transpose(loaded):
        return loaded | {"a.kernel": loaded["a.kernel"][::-1]}

    trip, _ = gates.conversion(FakeSide("one", params), FakeSide("other", params, damage=transpose), params)
    assert not trip.passed and trip.where == "a.kernel"


def test_conversion_names_a_parameter_that_the_model_ignores(params):
    held = {name: value for name, value in params.items() if name != "b.scale"}
    trip, _ = gates.conversion(FakeSide("one", held), FakeSide("other", held), params)
    assert not trip.passed and "b.scale" in trip.where


def test_conversion_fails_a_side_that_accepts_anything(params):
    _, strict = gates.conversion(FakeSide("one", params), FakeSide("loose", params, strict=False), params)
    assert not strict.passed and "loose: unused" in strict.where and "loose: misshapen" in strict.where


def test_an_oracle_passes_equal_values_and_names_the_first_that_differ_or_are_missing():
    wanted = {"a": np.ones(3), "b": np.arange(3.0)}
    assert gates.oracle("values", wanted, wanted, source="a book").passed
    failed = gates.oracle("values", wanted | {"b": wanted["b"] * (1 + 1e-8)}, wanted, source="a book")
    assert not failed.passed and (failed.id, failed.where, failed.note) == ("P11", "b", "a book")
    missing = gates.oracle("values", {"a": np.ones(3)}, wanted, source="a book")
    assert not missing.passed and missing.where == "b"


def test_a_statistic_that_chance_hardly_gives_fails():
    assert gates.chance("draws", {"x": 0.3, "y": 1e-5}, source="a test").passed
    failed = gates.chance("draws", {"x": 0.3, "y": 1e-9}, source="a test")
    assert not failed.passed and failed.where == "y" and failed.error == pytest.approx(9.0)
    for undefined in ({"x": 0.3, "y": np.nan}, {"y": np.nan, "x": 0.3}):  # such as a test of values that are NaN
        failed = gates.chance("draws", undefined, source="a test")
        assert not failed.passed and (failed.where, failed.error) == ("y", np.inf)


def test_sampled_tokens_are_compared_exactly_and_the_first_difference_is_named():
    tokens = np.arange(8).reshape(2, 4)
    other = tokens.copy()
    other[1, 2] += 1
    assert gates.sampling({"flax": tokens, "torch": tokens}).passed
    failed = gates.sampling({"flax": tokens, "torch": other})
    assert not failed.passed and failed.where == "row 1, step 2"
    assert not gates.sampling({"flax": tokens, "torch": tokens[:, :3]}).passed


def test_decoding_names_the_position_where_the_cache_goes_wrong():
    full = np.random.default_rng(0).normal(size=(2, 5, 7))
    late = full.copy()
    late[0, 3] += 1e-6
    right, wrong = capture.Decoding(full, full), capture.Decoding(full, late)
    results = gates.decoding(right, wrong, names=("flax", "torch"), tolerance=1e-9)
    assert [gate.passed for gate in results] == [True, False, False]
    assert results[1].where == "position 3" and results[1].what.startswith("torch")


def test_a_curve_inside_the_noise_passes_and_one_outside_names_its_step():
    curve = np.linspace(4.0, 3.0, 10).astype(np.float64)
    perturbed = [curve + 1e-6 * np.linspace(0.1, 1, 10) * sign for sign in (1, -1)]
    inside = gates.training_noise(curve + 1e-7, curve, perturbed, reference=curve, dtype="float32")
    assert inside.passed
    drifting = curve.copy()
    drifting[7] += 1e-4
    outside = gates.training_noise(drifting, curve, perturbed, reference=curve, dtype="float32")
    assert not outside.passed and outside.where == "step 7" and outside.error > 1


def trace(value):
    return capture.Trace(np.array(1.0), {"model": np.array([value])}, {}, {"w": np.array([2.0])})


def test_repeats_that_differ_widen_the_tolerance_by_as_much():
    gate, widen = gates.repeatability(trace(1.0), trace(1.0), name="flax")
    assert gate.passed and gate.note == "bit for bit" and widen["outputs"] == {"model": 0.0}
    gate, widen = gates.repeatability(trace(1.0), trace(1.0 + 1e-12), name="flax")
    assert gate.passed and widen["outputs"]["model"] == pytest.approx(1e-12, rel=1e-3)


def test_repeats_that_differ_more_than_a_bug_fail():
    gate, _ = gates.repeatability(trace(1.0), trace(1.01), name="torch")
    assert not gate.passed and gate.where == "outputs model" and gate.what.startswith("torch")


def test_a_gate_shows_the_first_failure_not_the_largest():
    reference = {"a": np.ones(3), "b": np.ones(3)}
    comparison = distance.compare({"a": np.ones(3) + 1e-6, "b": np.ones(3) * 2}, reference, kind="outputs")
    gate = gates.from_comparison("P1", comparison)
    assert (gate.id, gate.passed, gate.where) == ("P1", False, "a")
    assert gate.error == pytest.approx(1e-6, rel=1e-3)


def test_error_ratio_gate_reports_both_errors():
    reference = {"x": np.ones(4)}
    ratio = distance.compare_errors(
        {"x": np.ones(4) * (1 + 1e-2)},
        {"x": np.ones(4) * (1 + 1e-3)},
        reference,
        kind="outputs",
        dtype="float32",
        slack_epsilons=gates.SLACK_EPSILONS["outputs", "float32"],
    )
    gate = gates.from_ratio(ratio, what="outputs, float32")
    assert not gate.passed and gate.where == "x" and "1.0e-02 and 1.0e-03" in gate.note


def test_blame_passes_rounding_and_names_the_part_that_is_more():
    rounding = [capture.LocalError("a", 1e-16), capture.LocalError("model", 3e-16)]
    assert gates.blame(rounding).passed
    failed = gates.blame([*rounding, capture.LocalError("layers.0", 1e-3, child="layers.0.mlp")])
    assert not failed.passed and failed.where == "layers.0 (input of layers.0.mlp)"
