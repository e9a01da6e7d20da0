"""Rates of attention: what is called is causal attention and its gradients, FLOPs, kernels that are not there."""

from __future__ import annotations

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.gpu import ahead, attention_rates, rates
from jaxbench.gpu.attention_rates import Case, Shape
from jaxbench.measure import records
from tests.structure import ROOT

TINY = Shape(num_heads=4, kv_heads=2, head_dim=8)
BFLOAT16 = 2e-2  # of the largest entry: sums of few bfloat16 products


def command(folder, *words: str) -> subprocess.CompletedProcess:
    output = f"--output={folder / records.RESULTS_NAME}"
    call = [sys.executable, "-m", "jaxbench.gpu.attention_rates", "--device=cpu", output, *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)


def attention_in_float64(query, key, value, gradient):
    """Return output and gradients of [B T N H] by the definition, key and value with fewer heads."""
    heads, groups = query.shape[2], query.shape[2] // key.shape[2]
    key, value = (np.repeat(each, groups, axis=2) for each in (key, value))
    scale, length = query.shape[-1] ** -0.5, query.shape[1]
    scores = np.einsum("BTNH,BSNH->BNTS", query, key) * scale
    weights = np.exp(np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("BTNH,BSNH->BNTS", gradient, value)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)) * scale
    found = [
        np.einsum("BNTS,BSNH->BTNH", weights, value), np.einsum("BNTS,BSNH->BTNH", of_scores, key),
        np.einsum("BNTS,BTNH->BSNH", of_scores, query), np.einsum("BNTS,BTNH->BSNH", weights, gradient),
    ]  # fmt: skip
    summed = [each.reshape(*each.shape[:2], heads // groups, groups, -1).sum(3) for each in found[2:]]
    return found[:2] + summed


@pytest.mark.parametrize("shape", [TINY, Shape(2, 2, 8)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_call_is_causal_attention_and_with_the_backward_pass_its_gradients_too(library, shape):
    arrays = attention_rates.jax_arrays(Case("xla", shape, batch=2, tokens=8))
    wanted = attention_in_float64(*(np.asarray(each, np.float64) for each in arrays))
    if library == "jax":
        case = Case("xla", shape, 2, 8)
        one, four = (attention_rates.jax_call(case, passes)(*arrays) for passes in attention_rates.FLOPS_OF_PASSES)
        found = [np.asarray(each, np.float64) for each in (one, *four)]
    else:
        torch = pytest.importorskip("torch")
        case = Case("flash", shape, 2, 8)
        given = [torch.tensor(np.asarray(each, np.float32)).bfloat16().transpose(1, 2) for each in arrays]
        assert [each.shape for each in given] == [each.shape for each in attention_rates.torch_arrays(case, "cpu")]
        with attention_rates.torch_backend("flash"):
            one, four = (attention_rates.torch_call(case, passes)(*given) for passes in attention_rates.FLOPS_OF_PASSES)
        found = [each.transpose(1, 2).double().numpy() for each in (one, *four)]
    for each, right in zip(found, (wanted[0], *wanted), strict=True):
        assert np.max(np.abs(each - right)) <= BFLOAT16 * np.max(np.abs(right))


def test_arrays_are_random_and_of_bfloat16():
    torch = pytest.importorskip("torch")
    case = Case("flash", TINY, 2, 64)
    for each in attention_rates.jax_arrays(case):
        assert each.dtype == jnp.bfloat16 and 0.8 < float(jnp.std(each.astype(jnp.float32))) < 1.2
    for each in attention_rates.torch_arrays(case, "cpu"):
        assert each.dtype == torch.bfloat16 and 0.8 < each.float().std() < 1.2


COMPILED = """
import jax
from jaxbench.gpu import ahead, attention_rates
place = jax.sharding.SingleDeviceSharding(ahead.device("h200"))
for shape in attention_rates.SHAPES:
    for passes in ("forward", "forward_backward"):
        case = attention_rates.Case("cudnn", shape, batch=8, tokens=2048)
        arrays = [jax.ShapeDtypeStruct(size, "bfloat16", sharding=place) for size in case.sizes()]
        text = attention_rates.jax_call(case, passes).lower(*arrays).compile(ahead.OPTIONS).as_text()
        beside = [word for word in (" fusion(", " copy(", " transpose(") if word in text]
        print(passes, text.count('custom_call_target="__cudnn$fmha'), beside)
"""


@pytest.mark.skipif(bool(ahead.unavailable()), reason=ahead.unavailable() or "-")
def test_for_a_gpu_a_call_is_cudnns_kernels_and_nothing_beside_them():
    # In a process of its own: this one has a compile cache, which cannot hold programs for what is not attached.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["forward 1 []", "forward_backward 2 []"] * 2


def test_flops_are_of_the_causal_half_and_three_and_a_half_times_that_with_the_backward_pass():
    small, wide = (Case("cudnn", shape, batch=8, tokens=2048) for shape in attention_rates.SHAPES)
    assert small.flops("forward") == 51_539_607_552  # 4 x 8 x 12 x 2,048 x 2,048 x 64 / 2
    assert small.flops("forward_backward") == 180_388_626_432
    assert wide.flops("forward") == 137_438_953_472  # all 16 heads of queries, however few those of keys


def test_a_kernel_that_is_not_there_is_one_line_and_the_others_go_on(capsys):
    pytest.importorskip("torch")
    cases = [Case(kernel, TINY, 1, 8) for kernel in ("cudnn", "flash")]
    found = list(attention_rates.measured("torch", "cpu", cases))
    assert [(each.case.kernel, each.passes) for each in found] == [("flash", "forward"), ("flash", "forward_backward")]
    assert all(len(each.seconds) == rates.REPEATS and min(each.seconds) > 0 for each in found)
    assert [each.work for each in found] == [cases[1].flops(each.passes) * rates.IN_A_ROW for each in found]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "torch cudnn 4x8 kv2 forward", "torch cudnn 4x8 kv2 forward_backward",
    ]  # fmt: skip
    assert all("No viable backend" in line for line in lines)


@pytest.mark.parametrize(("library", "kernel"), [("jax", "xla"), ("torch", "flash")])
def test_the_command_appends_a_record_of_each_kernel_heads_and_passes(library, kernel, tmp_path):
    done = command(tmp_path, f"--library={library}", "--batch=1", "--tokens=16")
    assert done.returncode == 0, done.stderr[-2000:]
    found = records.RecordFile(tmp_path / records.RESULTS_NAME).read()
    assert [(each.metric, each.arm) for each in found] == [
        (f"attention_{passes}_flops_per_s", f"{library} {kernel} {heads}")
        for heads in ("12x64", "16x128 kv4")
        for passes in ("forward", "forward_backward")
    ]
    for each in found:
        assert each.workload.label() == "attention bfloat16 b1 p16" and each.versions[library]
        assert len(each.samples) == rates.REPEATS and each.value == max(each.samples) > 0
        assert each.detail["counted"].startswith("4 B N T T H / 2 forward")
    assert found[0].detail["flops"] == 4 * 12 * 16 * 16 * 64 / 2


def test_where_nothing_can_be_measured_the_command_fails_and_writes_nothing(tmp_path):
    pytest.importorskip("torch")
    done = command(tmp_path, "--library=torch", f"--batch={10**12}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failed: none of 2 attentions of torch could be measured on --device=cpu"
    assert len(done.stderr.splitlines()) == 5 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--batch=0", "--batch"),
        ("--tokens=0", "--tokens"),
        ("--library=numpy", "jax|torch"),
        ("--device=gpu", "this machine has none"),
        ("--output=configs", "--output=configs is a folder"),
        ("fast", "'fast' is not a flag"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = command(tmp_path, words)
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
