"""Weights of two models are matched by shape, name, use and values, and nothing stays unmatched in silence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.pair.matching import OTHER_LAYOUT, Leaf, match
from jaxbench.pair.rules import Rule, arrangements, to_torch

RANDOM = np.random.default_rng(0)


def leaves(*rows, is_reversed=False):
    return [Leaf(name, shape, i, is_reversed and name.endswith("kernel")) for i, (name, shape) in enumerate(rows)]


def rules_of(arrays, tensors, names=None):
    return match(arrays, tensors, names).rules


def test_kernels_are_transposed_and_convolutions_turned_round():
    arrays = leaves(("dense.kernel", (6, 6)), ("conv.kernel", (3, 3, 4, 4)), is_reversed=True)
    found = rules_of(arrays, leaves(("fc.weight", (6, 6)), ("features.weight", (4, 4, 3, 3))))
    assert found["dense.kernel"].arrangement.axes == (1, 0)
    assert found["conv.kernel"].arrangement.axes == (2, 3, 1, 0)


def test_a_square_matrix_of_a_class_without_a_layout_keeps_its_axes_unless_the_values_say_otherwise():
    value = RANDOM.standard_normal((4, 4))
    array, tensor = Leaf("w", (4, 4), 0, True), Leaf("w", (4, 4), 0, is_bare=True)
    assert rules_of([array], [tensor])["w"].arrangement.axes == (0, 1)
    (guess,) = match([array._replace(value=value)], [tensor._replace(value=value.T)]).guesses
    assert guess.rule.arrangement.axes == (1, 0) and guess.why == OTHER_LAYOUT


def test_query_key_and_value_come_out_of_one_fused_tensor_in_their_order():
    names = ("value", "key", "query")  # defined in another order
    arrays = leaves(*((f"attention.{name}.kernel", (8, 2, 4)) for name in names), is_reversed=True)
    found = rules_of(arrays, leaves(("self_attn.in_proj_weight", (24, 8))))
    assert [found[f"attention.{name}.kernel"].part for name in ("query", "key", "value")] == [(0, 3), (1, 3), (2, 3)]


def test_tensors_stand_side_by_side_in_one_fused_array():
    arrays = leaves(("qkv.kernel", (8, 24)), is_reversed=True)
    tensors = leaves(("v.weight", (8, 8)), ("q.weight", (8, 8)), ("k.weight", (8, 8)))
    rule = rules_of(arrays, tensors)["qkv.kernel"]
    assert rule.sources == ("q.weight", "k.weight", "v.weight") and rule.joined == 1
    values = {leaf.name: RANDOM.standard_normal(leaf.shape) for leaf in tensors}
    expected = np.concatenate([values[name].T for name in rule.sources], axis=1)
    np.testing.assert_array_equal(rule.apply(values), expected)


def test_layers_of_one_shape_are_told_apart_by_order_of_use_where_names_say_nothing():
    arrays = leaves(*((f"tower.{word}.kernel", (5, 5)) for word in ("alpha", "beta", "gamma")), is_reversed=True)
    found = rules_of(arrays, leaves(*((f"{i}.weight", (5, 5)) for i in (0, 2, 4))))
    assert [rule.sources[0] for rule in found.values()] == ["0.weight", "2.weight", "4.weight"]


def test_equal_values_overrule_names():
    a, b = RANDOM.standard_normal((4, 4)), RANDOM.standard_normal((4, 4))
    arrays = [Leaf("first.kernel", (4, 4), 0, True, a), Leaf("second.kernel", (4, 4), 1, True, b)]
    tensors = [Leaf("first.weight", (4, 4), 0, False, b.T), Leaf("second.weight", (4, 4), 1, False, a.T)]
    found = match(arrays, tensors)
    assert [guess.rule.sources[0] for guess in found.guesses] == ["second.weight", "first.weight"]
    assert {guess.why for guess in found.guesses} == {"same values"}


def test_a_norm_belongs_to_the_convolution_that_it_reads():
    arrays = [
        Leaf("shortcut_conv.w", (1, 1, 4, 8), 0, True), Leaf("shortcut_bn.scale", (8,), 1, source="shortcut_conv"),
        Leaf("conv_0.w", (3, 3, 4, 8), 2, True), Leaf("bn_0.scale", (8,), 3, source="conv_0"),
    ]  # fmt: skip
    tensors = [
        Leaf("conv1.weight", (8, 4, 3, 3), 0), Leaf("bn1.weight", (8,), 1, source="conv1"),
        Leaf("side.0.weight", (8, 4, 1, 1), 2), Leaf("side.1.weight", (8,), 3, source="side.0"),
    ]  # fmt: skip
    found = rules_of(arrays, tensors)
    assert found["shortcut_bn.scale"].sources == ("side.1.weight",) and found["bn_0.scale"].sources == ("bn1.weight",)


@pytest.mark.parametrize(
    ("arrays", "tensors", "names", "message"),
    [
        ([("a.kernel", (2, 3))], [("a.weight", (4, 5))], {}, "JAX arrays left over: a.kernel"),
        ([("a.kernel", (2, 3))], [("a.weight", (3, 2)), ("b.bias", (7,))], {}, "PyTorch tensors left over: b.bias"),
        ([("a.kernel", (2, 3))], [("a.weight", (3, 2))], {"a.kernle": "a.weight"}, "nearest: a.kernel"),
        ([("a.kernel", (2, 3))], [("a.weight", (3, 2))], {"a.kernel": "a.wieght"}, "nearest: a.weight"),
        ([("a.kernel", (2, 3))], [("a.weight", (3, 2)), ("b", (7,))], {"a.kernel": "b"}, "cannot be arranged"),
        ([("a.kernel", (2, 3))], [("a.weight", (3, 2))], {"c.weight": None}, "no such PyTorch tensor"),
    ],
)
def test_what_does_not_match_is_named(arrays, tensors, names, message):
    with pytest.raises(ValueError, match=message):
        match(leaves(*arrays, is_reversed=True), leaves(*tensors), names)


def test_what_the_caller_says_holds():
    arrays, tensors = leaves(("a.kernel", (3, 3))), leaves(("a.weight", (3, 3)), ("other", (3, 3)), ("extra", (2,)))
    double = lambda values: 2 * values["other"]
    found = match(arrays, tensors, {"a.kernel": double, "a.weight": None, "extra": None})
    assert found.rules == {"a.kernel": double} and set(found.ignored) == {"a.weight", "extra", "other"}


@given(st.permutations(range(4)), st.booleans())
def test_every_arrangement_goes_back_to_the_tensor(axes, is_reversed):
    x = RANDOM.standard_normal((2, 3, 4, 5))
    for arrangement in arrangements(x.shape, tuple(x.shape[i] for i in axes), is_reversed=is_reversed):
        y = arrangement.apply(x)
        assert y.shape == arrangement.shape
        np.testing.assert_array_equal(arrangement.invert(y, x.shape), x)


def test_tensors_come_back_from_arrays_of_all_kinds_of_rules():
    arrays = leaves(
        ("q.kernel", (8, 2, 4)), ("k.kernel", (8, 2, 4)), ("v.kernel", (8, 2, 4)), ("both.kernel", (5, 14)),
        ("conv.kernel", (3, 3, 2, 6)), is_reversed=True,
    )  # fmt: skip
    tensors = leaves(
        ("in_proj_weight", (24, 8)), ("left.weight", (7, 5)), ("right.weight", (7, 5)), ("c.weight", (6, 2, 3, 3))
    )
    found = match(arrays, tensors)
    values = {leaf.name: RANDOM.standard_normal(leaf.shape) for leaf in tensors}
    shapes = {leaf.name: leaf.shape for leaf in tensors}
    back = to_torch(found.rules, found.to_jax(values), shapes)
    assert back.keys() == values.keys()
    assert all(np.array_equal(back[name], values[name]) for name in values)


def test_a_function_by_hand_has_no_way_back_and_a_part_fills_no_tensor():
    with pytest.raises(ValueError, match="has no inverse"):
        to_torch({"a": lambda values: values["b"]}, {"a": np.zeros(2)}, {"b": (2,)})
    half = Rule(("b",), arrangements((2,), (2,), is_reversed=False)[0], part=(0, 2))
    with pytest.raises(ValueError, match="only parts"):
        to_torch({"a": half}, {"a": np.zeros(2)}, {"b": (4,)})
