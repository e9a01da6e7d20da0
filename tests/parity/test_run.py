"""Every tiny case through the gates: float64 equality of outputs, gradients, training, decoding and sampling."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from jaxbench import outputs
from jaxbench.parity import cases, distance, gates, mutation, run
from tests import codegen
from torch_ref import functional

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TINY = [case.id for case in cases.CASES if case.config is not None and case.exact is None and case.device is None]
# One case a family also passes the narrower types' gates, and is compiled as for users; all of them do and are in
# `experiments/parity.py --all`.
WITH_REDUCED = ("transformer/llama-grouped", "transformer/llama-far", "transformer/qwen3", "transformer/gpt2")
WITH_OTHERS = (
    "transformer/gemma3",
    "transformer/qwen3",
    "transformer/llama-blocked-window",
    "transformer/gpt2-untied-blocked",
    "transformer/llama-scan",
)


@functools.cache
def result(case_id, backend="flax"):
    if case_id in WITH_REDUCED and backend == "flax":
        return run.run(cases.find(case_id), backend=backend)
    with codegen.plain():
        return run.run(cases.find(case_id), backend=backend, dtypes=())


def failures(found):
    return [gate for gate in found["gates"] if not gate["passed"]]


@pytest.mark.parametrize("case_id", TINY)
def test_flax_and_torch_compute_the_same_function(case_id):
    found = result(case_id)
    assert failures(found) == [] and found["passed"]
    assert found["first_divergence"] is None and found["blame"] is None
    whats = {gate["what"] for gate in found["gates"]}
    wanted = {"loss", "outputs", "gradients", "params after 20 steps", "first moment after 20 steps", "training curve"}
    assert {f"{kind}, float64" for kind in wanted} <= whats
    case = cases.find(case_id)
    assert ("sampled tokens" in whats) == case.sampled
    assert ("cached decode, both backends" in whats) == (not case.packed and case.prompt > 0)
    # A bank's modules are called inside its walk over blocks, where nothing can be captured.
    fewest = 1 if "bank" in case.id else 10
    assert len(found["layers"]) == 1 if case.is_scanned else len(found["layers"]) > fewest
    assert found["worst"] <= distance.TOLERANCE_FLOAT64


@pytest.mark.parametrize("backend", [backend for backend in cases.BACKENDS if backend != "flax"])
@pytest.mark.parametrize("case_id", WITH_OTHERS)
def test_every_other_backend_and_torch_compute_the_same_function(case_id, backend):
    found = result(case_id, backend=backend)
    assert failures(found) == []
    assert {"gradients, float64", "params after 20 steps, float64"} <= {gate["what"] for gate in found["gates"]}
    if cases.find(case_id).is_scanned:
        assert len(found["layers"]) == 1
    else:
        assert "P4" in {gate["id"] for gate in found["gates"]} and len(found["layers"]) > 10
        assert all(row["own"] is not None and row["gradient"] is not None for row in found["layers"])


@pytest.mark.parametrize("case_id", WITH_REDUCED)
def test_narrow_types_err_alike_and_float32_training_stays_within_noise(case_id):
    whats = {gate["what"]: gate for gate in result(case_id)["gates"]}
    for dtype in run.REDUCED:
        for kind in ("outputs", "gradients"):
            assert whats[f"{kind}, {dtype}"]["passed"]
            # The gate must measure something: errors of the type's own size.
            epsilon = distance.MACHINE_EPSILON[dtype]
            assert whats[f"{kind}, {dtype}"]["error"] > 0.1 * epsilon
    assert whats["training curve, float32: gap within noise"]["passed"]


def test_a_case_of_a_kernel_proves_it_in_bfloat16_with_gradients_and_decoding():
    """The path of fused attention on a GPU, walked with blocked attention, which any device has."""
    case = cases.find("transformer/llama-kernel")._replace(kernel="blocked", options={"block_size": 16}, steps=0)
    found = run.run(case)
    whats = {gate["what"] for gate in found["gates"]}
    assert failures(found) == [] and {f"{kind}, bfloat16" for kind in ("outputs", "decoding", "gradients")} <= whats
    assert "outputs, float32" not in whats and "outputs, float64" in whats


def test_rounding_errors_are_compared_at_real_positions_that_count_alike():
    reference = {"x": np.array([[[3.0, 4.0], [0.0, 1e-3], [7.0, 7.0]]])}
    value = {"x": np.array([[[3.0, 4.5], [0.0, 2e-3], [0.0, 0.0]]])}
    scaled = run.unit_positions(value, reference, np.array([[0, 1, -1]]))
    np.testing.assert_allclose(scaled["x"], [[0.6, 0.9], [0.0, 2.0]])


def test_gates_cover_p1_to_p8_and_p10():
    found = {gate["id"] for gate in result("transformer/llama-grouped")["gates"]}
    assert found == {"P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P10"}


def test_rotary_angles_in_bfloat16_fail_where_positions_are_large(monkeypatch):
    """A twin that loses its place after some hundred tokens: near the start no gate can tell it from rounding."""
    original = functional.rotary_angles

    def narrow(positions, frequencies, *, dtype):
        if dtype != "bfloat16":
            return original(positions, frequencies, dtype=dtype)
        angles = positions.bfloat16()[:, :, None] * torch.tensor(frequencies, dtype=torch.bfloat16)
        return torch.cos(angles).float(), torch.sin(angles).float()

    monkeypatch.setattr(functional, "rotary_angles", narrow)
    found = run.run(cases.find("transformer/llama-far"), gradients=False, dtypes=("bfloat16",))
    failed = {gate["what"]: gate["where"] for gate in found["gates"] if not gate["passed"]}
    assert failed == {"outputs, bfloat16": "layers.0.attention.o_proj"}


def test_training_lowers_the_loss_of_the_batches_it_sees():
    case = cases.find("transformer/llama-grouped")
    config, params = cases.load(case)
    from jaxbench.parity import evidence

    with run.pinned("float64"):
        _, side = run.sides(case, config, params, dtype="float64", backend="flax")
        losses = side.train(
            evidence.training_steps(case, config),
            case.step,
            learning_rates=evidence.learning_rates(case),
            seed=evidence.SEED,
        ).losses
    assert losses[-4:].mean() < losses[:4].mean() - 0.1


def test_a_result_survives_json_and_a_write_leaves_no_temporary_file(tmp_path):
    found = result("transformer/llama-grouped")
    outputs.write_json(tmp_path / "deep" / "parity.json", found)
    assert json.loads((tmp_path / "deep" / "parity.json").read_text()) == json.loads(json.dumps(found))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["parity.json"]


def test_an_unknown_backend_is_an_error_that_lists_the_known_ones():
    case = cases.find("transformer/gpt2")
    with pytest.raises(ValueError, match="--backend=keras is not one of flax, equinox"):
        run.run(case, backend="keras")


def test_the_default_model_is_equal_in_float64_in_its_own_process(tmp_path):
    output = tmp_path / "parity.json"
    command = [sys.executable, "-m", "jaxbench.parity.run", "--quick", f"--output={output}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_ENABLE_X64": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert failures(found) == [] and found["worst"] <= distance.TOLERANCE_FLOAT64
    whats = {gate["what"] for gate in found["gates"]}
    assert {"outputs, float64", "flax: cached decode = full call", "cached decode, both backends"} <= whats
    modules = {row["module"] for row in found["layers"]}
    assert "layers.29.mlp.down_proj" in modules and len(modules) == 30 * 12 + 3


def test_a_broken_twin_fails_its_gates_and_the_module_is_named():
    [bug] = [bug for bug in mutation.MUTATIONS if bug.name == "attention-scale-3-percent-in-one-layer"]
    with bug.injected():
        found = run.run(cases.find("transformer/llama-grouped"), quick=True)
    assert not found["passed"]
    # The output projection is the first module to return something else; the attention around it is the cause.
    assert found["first_divergence"] == "layers.1.attention.o_proj"
    assert found["blame"]["module"] == "layers.1.attention"
    assert found["blame"]["error"] > 1e-4
    failed = {gate["id"] for gate in failures(found)}
    assert {"P1", "P4"} <= failed and "P5" not in failed


def test_limits_are_those_of_the_design():
    assert distance.TOLERANCE_FLOAT64 == 1e-9 and distance.ERROR_RATIO == 1.5
    assert max(gates.SLACK_EPSILONS.values()) <= 4
