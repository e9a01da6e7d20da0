"""Rates of a device by either library, and the bad input of the commands that are modules of jaxbench.gpu."""

import subprocess
import sys

import jax
import pytest
from torch._dynamo.utils import counters

from jaxbench.gpu import one_arm, rates
from jaxbench.measure import records
from jaxbench.parity.cases import GPT2, LLAMA
from tests.structure import ROOT

SIZE, BYTES = 16, 4096


def measured(library, names):
    if library == "jax":
        return list(rates.jax_rates(SIZE, BYTES, names))
    return list(rates.torch_rates(SIZE, BYTES, "cpu", names))


def module(name, *arguments):
    command = [sys.executable, "-m", f"jaxbench.gpu.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_first_call_is_not_counted():
    calls, waited = iter(range(100)), []
    assert len(rates.timed(lambda: next(calls), waited.append)) == rates.REPEATS
    assert waited == list(range(rates.REPEATS + 1))


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_rate_is_of_all_bytes_read_and_all_products_of_a_call(library):
    read, *products = measured(library, ["float32", "tf32", "bfloat16"])
    assert (read.kind, read.dtype, read.work) == ("read", "bfloat16", BYTES * rates.IN_A_ROW)
    assert [(each.kind, each.dtype) for each in products] == [
        ("gemm", name) for name in ("float32", "tf32", "bfloat16")
    ]
    assert {each.work for each in products} == {2.0 * SIZE**3 * rates.IN_A_ROW}
    assert all(len(each.seconds) == rates.REPEATS and min(each.seconds) > 0 for each in (read, *products))


def test_a_compile_time_is_cold_only_if_a_cache_saved_no_share_of_it():
    flax, torch = rates.seconds_saved("flax"), rates.seconds_saved("torch")
    assert flax() == torch() == 0 and rates.compile_metric(20.0, 0.0) == "compile_cold_s"
    jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 7.0)
    jax.monitoring.record_event_duration_secs("/jax/compilation_cache/compile_time_saved_sec", 19.0)
    counters["inductor"]["fxgraph_cache_hit"] += 1
    assert rates.compile_metric(1.0, flax()) == rates.compile_metric(1.0, torch()) == "compile_warm_s"
    assert rates.compile_metric(20.0, 0.5) == "compile_cold_s"


def test_a_decode_step_reads_all_weights_but_tables_in_which_it_looks_up_rows():
    form = one_arm.Form("bfloat16", "dense")
    untied = LLAMA.model_copy(update={"tie_embeddings": False})
    assert one_arm.read_bytes(LLAMA, form, 10**6) == 10**6
    assert one_arm.read_bytes(untied, form, 10**6) == 10**6 - 2 * LLAMA.vocab_size * LLAMA.d_model
    assert one_arm.read_bytes(GPT2, form, 10**6) == 10**6 - 2 * GPT2.max_seq_len * GPT2.d_model


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_number_type_that_a_library_does_not_know_is_left_out_and_named(library, capsys, monkeypatch):
    monkeypatch.setitem(rates.DTYPES, "float3", "float3_e1m1")
    found = measured(library, ["float3", "float32"])
    assert [each.dtype for each in found if each.kind == "gemm"] == ["float32"]
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("float3: ")


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_without_number_types_only_reading_is_measured(library):
    assert [each.kind for each in measured(library, [])] == ["read"]


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_the_command_appends_records_of_positive_rates(library, tmp_path):
    path = tmp_path / "new" / records.RESULTS_NAME
    words = f"--library={library}", "--device=cpu", f"--size={SIZE}", f"--read_bytes={BYTES}", f"--output={path}"
    for number in (1, 2):
        done = module("rates", *words, "--dtypes=float32,bfloat16")
        assert done.returncode == 0, done.stderr
        found = records.read_lines(path)
        assert len(found) == 3 * number
    assert {(each.metric, each.unit, each.workload.kind, each.workload.dtype) for each in found} == {
        ("read_bandwidth_bytes_per_s", "bytes/s", "read", "bfloat16"),
        ("gemm_flops_per_s", "FLOP/s", "gemm", "float32"),
        ("gemm_flops_per_s", "FLOP/s", "gemm", "bfloat16"),
    }
    for each in found:
        assert (each.arm, each.device, each.status) == (library, "cpu", "ok")
        assert len(each.samples) == rates.REPEATS and min(each.samples) > 0
        assert each.value == max(each.samples)
        assert each.detail["size"] == (BYTES if each.workload.kind == "read" else SIZE)
        assert each.versions[library]
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "words", "wanted"),
    [
        ("rates", "--size=0", "--size"),
        ("rates", "--read_bytes=1", "--read_bytes"),
        ("rates", "--device=cpu --dtypes=float32,int3", "--dtypes='int3' is unknown, wanted some of float32"),
        ("rates", "--library=numpy", "jax|torch"),
        ("rates", "--device=gpu", "this machine has none"),
        ("rates", "--device=cpu --output=configs", "--output=configs is a folder"),
        ("rates", "--device=cpu --output=README.md/x", "README.md is a file"),
        ("rates", "--device=cpu fast", "'fast' is not a flag"),
        ("one_arm", "--device=cpu --steps=0", "--steps"),
        ("one_arm", "--device=cpu --workload=prefill", "train|memory_ladder|largest_batch|decode|ladder"),
        ("one_arm", "--device=cpu --workload=largest_batch --backend=torch", "largest_batch is Flax's; got"),
        ("one_arm", "--device=cpu --workload=memory_ladder --memory_mib=0", "--memory_mib"),
        ("one_arm", "--device=cpu --output=configs", "--output=configs is a folder"),
        ("one_arm", "--device=cpu --workload=decode --prompt_tokens=100000", "100000 + 128 tokens"),
        ("one_arm", "--device=cpu --config=none.yaml", "none.yaml"),
        ("one_arm", "--device=cpu --workload=decode --set=step.precision=float8", "step.precision=float8"),
        ("one_arm", "--device=cpu --workload=decode --weights=int3", "float|int8|int4"),
        ("one_arm", "--device=cpu --workload=decode --products=cuda", "xla|pallas"),
        ("one_arm", "--device=cpu --workload=ladder --backend=torch", "--backend=torch"),
        ("one_arm", "--device=cpu --workload=ladder --weights=int4", "--weights=int4"),
        ("one_arm", "--device=cpu --workload=decode --backend=torch --compile --weights=int8", "torch.compile"),
        ("ahead", "--target=a100", "h100|h200"),
        ("ahead", "--new_tokens=1", "--new_tokens"),
        ("ahead", "--output=configs", "--output=configs is a folder"),
        ("ahead", "--config=none.yaml", "none.yaml"),
    ],
)
def test_bad_input_of_a_module_is_one_line_and_exit_code_2(name, words, wanted, tmp_path):
    output = [] if "--output" in words else [f"--output={tmp_path / 'results.jsonl'}"]
    done = module(name, *output, *words.split())
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and wanted in done.stderr
    assert list(tmp_path.iterdir()) == []
