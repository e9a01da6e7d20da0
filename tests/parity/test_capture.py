"""Capture: names, blame, and module outputs and gradients taken from unchanged models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import functional, transformer
from jaxbench.parity import capture, cases, flax_side, run, torch_side
from jaxbench.parity.capture import Call, LocalError

CASE = cases.find("transformer/llama-untied")


@pytest.fixture(scope="module")
def traced():
    config, params = cases.load(CASE)
    arrays = cases.arrays(CASE, config)
    with run.pinned("float64"):
        pair = run.sides(CASE, config, params, dtype="float64", backend="flax")
        traces = [side.trace(arrays, gradients=True, seed=3) for side in pair]
        calls = pair[1].calls(arrays, seed=3)
    return arrays, pair, traces, calls


def test_both_sides_capture_the_same_modules_down_to_every_projection(traced):
    _, _, (flax, torch_trace), _ = traced
    assert flax.outputs.keys() == torch_trace.outputs.keys() == flax.output_gradients.keys()
    inner = {f"layers.{i}.attention.{p}_proj" for i in range(2) for p in "qkvo"}
    assert inner | {"embed", "layers.0.mlp.gate_proj", "layers.1", "final_norm", "head", "model"} <= flax.outputs.keys()


def test_torch_lists_modules_in_the_order_they_finish_and_gradients_backward(traced):
    _, _, (_, trace), _ = traced
    names = list(trace.outputs)
    assert names[0] == "embed" and names[-1] == "model"
    assert names.index("layers.0.attention.q_proj") < names.index("layers.0.attention") < names.index("layers.0")
    backward = list(trace.output_gradients)
    assert backward.index("layers.1") < backward.index("layers.0") < backward.index("embed")


def test_capture_changes_neither_result_nor_classes(traced):
    arrays, (side, _), (trace, _), _ = traced
    before = transformer.Attention.__call__
    with run.pinned("float64"):
        stream = functional.DropoutStream(flax_side.prng.key_from_seed(3), jnp.int32(0))
        tokens, positions = jnp.asarray(arrays.tokens), jnp.asarray(arrays.positions)
        logits = jax.jit(lambda model: model(tokens, positions, dropout=stream))(side.model)
        side.trace(arrays, gradients=False, seed=3)
    np.testing.assert_allclose(trace.outputs["model"], logits, rtol=1e-12, atol=1e-13)
    assert transformer.Attention.__call__ is before


def test_gradient_of_the_logits_is_softmax_minus_one_hot(traced):
    arrays, _, traces, _ = traced
    for trace in traces:
        logits = trace.outputs["model"]
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True)
        expected -= np.eye(logits.shape[-1])[arrays.targets]
        expected *= arrays.mask[:, :, None] / arrays.mask.sum()
        np.testing.assert_allclose(trace.output_gradients["model"], expected, rtol=1e-9, atol=1e-12)


def test_forced_calls_see_the_twins_inputs_so_errors_are_not_inherited(traced):
    arrays, (side, _), _, calls = traced
    broken = dict(calls)
    # The twin claims another result of one projection: only the call that produces it may differ.
    wrong = calls["layers.0.attention.v_proj"]
    broken["layers.0.attention.v_proj"] = Call(wrong.inputs, (wrong.outputs[0] * 1.01,))
    with run.pinned("float64"):
        local = capture.local_errors(side.forced(arrays, broken, seed=3), broken)
    over = {(entry.module, entry.part) for entry in local if entry.error > 1e-9}
    assert ("layers.0.attention.v_proj", "output") in over
    # The values it claims travel on inside the attention that uses them, and nowhere else.
    assert {module for module, _ in over} <= {"layers.0.attention.v_proj", "layers.0.attention"}


def test_the_first_module_with_an_error_of_its_own_is_blamed():
    x = np.ones(3)
    reference = {"a.inner": Call((x,), (x,)), "a": Call((x,), (x,)), "model": Call((), (x,))}
    forced = reference | {"a.inner": Call((x * 2,), (x,))}
    local = capture.local_errors(forced, reference)
    assert capture.blame(local, tolerance=1e-9) == LocalError("a", 1.0, child="a.inner")
    assert capture.blame(capture.local_errors(reference, reference), tolerance=1e-9) is None


def test_reports_name_the_part_that_has_the_error():
    errors = [LocalError("a", 1.0), LocalError("a", 1.0, output=1), LocalError("a", 1.0, child="a.inner")]
    assert [error.part for error in errors] == ["output", "output 1", "input of a.inner"]
    assert [error.is_first_output for error in errors] == [True, False, False]
    assert errors[2].as_dict() == {"module": "a", "part": "input of a.inner", "error": 1.0}


def test_a_result_that_is_not_a_number_is_blamed():
    x = np.ones(2)
    local = capture.local_errors({"model": Call((), (x * np.nan,))}, {"model": Call((), (x,))})
    assert capture.blame(local, tolerance=1e-9).module == "model"


def test_modules_that_only_one_side_has_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"missing \['b'\]"):
        capture.local_errors({}, {"b": Call((), ())})


def test_another_number_of_tensors_is_an_error_that_names_the_module():
    x = np.ones(1)
    with pytest.raises(ValueError, match="output of model: 2 tensors, the twin has 1"):
        capture.local_errors({"model": Call((), (x, x))}, {"model": Call((), (x,))})


def test_hooks_are_gone_after_a_run(traced):
    _, (_, side), _, _ = traced
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in side.model.modules())


@pytest.mark.parametrize(("name", "parent"), [("a.b.c", "a.b"), ("a.x.c", "a"), ("a", "model"), ("z.0.q", "model")])
def test_the_enclosing_module_is_the_nearest_one_that_was_called(name, parent):
    assert capture.enclosing_module(name, {"a": 0, "a.b": 0, "model": 0}) == parent


def test_floating_tensors_are_replaced_in_place_and_all_else_is_kept():
    tree = (torch.ones(2), {"n": torch.arange(2)}, [None, torch.zeros(1)], "text")
    found = torch_side._floating(tree)
    assert [tuple(x.shape) for x in found] == [(2,), (1,)]
    replaced = flax_side._replace((jnp.ones(2), {"k": jnp.zeros(1)}, 3), (jnp.zeros(2), jnp.ones(1)), where="here")
    assert float(replaced[0].sum()) == 0.0 and float(replaced[1]["k"][0]) == 1.0 and replaced[2] == 3
    with pytest.raises(ValueError, match="here: 1 floating tensors in JAX, 2 in the twin"):
        flax_side._replace((jnp.ones(2),), (1, 2), where="here")
