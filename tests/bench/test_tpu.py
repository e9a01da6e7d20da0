"""Ahead-of-time compilation for TPU slices, in a process of its own as the comparison runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from absl import flags

from jaxbench import config
from jaxbench.bench import tpu
from jaxbench.config import TransformerConfig
from jaxbench.measure import chips, hlo, tpu_compile
from jaxbench.measure.records import Workload, read_lines

TINY = TransformerConfig(
    vocab_size=512, d_model=128, d_ff=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64, max_seq_len=256
)
SLICES = {"v5e:2x2": 4, "v5p:2x2x1": 4}  # name -> chips
needs_libtpu = pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")


def records_of(measured: tpu_compile.Compiled, *, flops: int, traffic: int, kind: str = "train"):
    """Return the records that one made-up compile result gives, by metric."""
    workload = Workload(kind=kind, dtype="bfloat16", batch=8, prompt_tokens=512)
    topology = chips.parse_topology("v5e:2x2")
    found = tpu.make_records(measured, flops, traffic, topology, tpu.Settings(), workload, 30)
    return {record.metric: record for record in found}


def measured(**changes) -> tpu_compile.Compiled:
    """Return a compile result with round numbers."""
    memory = {"argument": 2**30, "output": 2**30, "alias": 2**30, "temp": 2**31, "code": 0}
    reduce = hlo.Collective("all-reduce", 3, 200, int(2e8), 0)
    return tpu_compile.Compiled(1.5, memory, 1.97e12, 5e9, {"all-reduce": reduce})._replace(**changes)


def test_roofline_is_the_longest_of_three_published_rates():
    found = records_of(measured(), flops=int(1.97e12), traffic=int(8.19e8))["tpu_roofline_s"]
    assert found.value == pytest.approx(0.01)  # 1.97e12 FLOP at 197e12 FLOP/s
    assert found.detail["memory_s"] == pytest.approx(0.001)  # 8.19e8 bytes at 819e9 bytes/s
    assert found.detail["interconnect_s"] == pytest.approx(0.001)  # 2e8 bytes at 200e9 bytes/s
    assert found.detail["bound"] == "compute"
    assert found.detail["tokens_per_s"] == pytest.approx(8 * 512 / 0.01)


def test_memory_counts_donated_buffers_once_and_compares_with_the_chip():
    fits = records_of(measured(), flops=1, traffic=1)["tpu_memory_bytes"]
    assert fits.value == 3 * 2**30 and fits.detail["fits"] is True
    large = measured(memory={"argument": 2**34, "output": 2, "alias": 1, "temp": 0, "code": 0})
    assert records_of(large, flops=1, traffic=1)["tpu_memory_bytes"].detail["fits"] is False


@pytest.mark.parametrize("how", ["compiled", "refused"])
def test_the_command_ends_with_1_where_a_program_does_not_fit(monkeypatch, capsys, how):
    small = list(records_of(measured(), flops=1, traffic=1).values())
    memory = {"argument": 2**34, "output": 2, "alias": 1, "temp": 0, "code": 0}
    large = list(records_of(measured(memory=memory), flops=1, traffic=1).values())
    error = tpu_compile.DoesNotFitError("does not fit: 24.00G of 15.75G hbm")
    workload = Workload(kind="train", dtype="bfloat16", batch=8, prompt_tokens=512)
    refused = [tpu_compile.refusal(error, {"hbm_bytes": 2**34}, workload=workload, device="v5e:2x2")]
    found = {"v5e:2x2": [small, large if how == "compiled" else refused], "v5e:1x1": [small]}
    given = tpu.Settings().model_dump() | {"model_config": None, "output": None, "topology": list(found)}
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(**given))
    monkeypatch.setattr(tpu, "compile_topology", lambda model, topology, settings: iter(found[topology.name]))
    assert tpu.main() == 1 and "does not fit" in capsys.readouterr().out
    found["v5e:2x2"].pop()
    assert tpu.main() == 0


def test_decode_rate_counts_one_token_a_row():
    found = records_of(measured(), flops=1, traffic=int(8.19e8), kind="decode")["tpu_roofline_s"]
    assert found.detail["tokens_per_s"] == pytest.approx(8 / 0.001)


def test_unknown_topology_and_model_axis_are_refused_before_compiling():
    with pytest.raises(ValueError, match="unknown topology 'v5e:2x3'.*v5e:2x2"):
        tpu.check(["v5e:2x2", "v5e:2x3"])
    with pytest.raises(ValueError, match="model_axis=3 does not divide the 4 chips of v5e:2x2"):
        tpu.check(["v5e:2x2"], tpu.Settings(model_axis=3))


def test_missing_libtpu_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(tpu_compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[tpu\]'"):
        next(tpu.compile_topology(TINY, chips.parse_topology("v5e:2x2"), tpu.Settings()))


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    """Run `python -m jaxbench.bench.tpu` with the inherited environment."""
    command = [sys.executable, "-m", "jaxbench.bench.tpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"XLA_FLAGS": ""})


def test_command_refuses_an_unknown_topology_with_exit_code_2():
    done = run_module("--topology=v5e:9x9")
    assert done.returncode == 2
    assert "unknown topology 'v5e:9x9'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "said"), [("--dtype=int7", "flag --dtype=int7"), ("--output=/dev/null/a.jsonl", "--output=/dev/null")]
)
def test_command_refuses_an_unknown_type_and_an_output_that_cannot_be_written_before_it_compiles(flag, said):
    done = run_module("--topology=v5e:1x1", flag)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile the tiny model for two slices at once, as two comparisons on one machine would; return their outputs."""
    folder = tmp_path_factory.mktemp("tpu")
    config.dump(TINY, folder / "model.yaml")
    shapes = {"prefill_tokens": 128, "decode_batch": 6, "train_batch": 4, "train_tokens": 128, "train_layers": 1}
    started = {}
    for topology in SLICES:
        output = folder / f"{topology.replace(':', '-')}.jsonl"
        command = [sys.executable, "-m", "jaxbench.bench.tpu", f"--topology={topology}", f"--output={output}"]
        command += [f"--model_config={folder}/model.yaml", *(f"--{name}={value}" for name, value in shapes.items())]
        environment = os.environ | {"XLA_FLAGS": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[topology] = (subprocess.Popen(command, env=environment, **pipes), output)
    try:
        return {
            name: (process, process.communicate(timeout=280)[1], output) for name, (process, output) in started.items()
        }
    finally:
        for process, _ in started.values():
            process.kill()


@needs_libtpu
@pytest.mark.parametrize("topology", SLICES)
def test_a_tiny_model_compiles_for_a_slice_and_is_counted(compiled, topology):
    process, stderr, output = compiled[topology]
    assert process.returncode == 0, stderr
    assert stderr == "", "the compiler's log noise belongs silenced"
    found = {(record.workload.kind, record.metric): record for record in read_lines(output)}
    assert {kind for kind, _ in found} == {"prefill", "decode", "train"}
    assert {record.device for record in found.values()} == {topology}
    for kind in ("prefill", "decode", "train"):
        assert found[kind, "tpu_memory_bytes"].detail["fits"] is True
        # The compiler also counts elementwise work, which weighs more the narrower the model.
        assert 0.99 < found[kind, "tpu_flops"].detail["compiled_over_analytic"] < 1.4
    assert found["decode", "tpu_flops"].workload.batch == 8, "6 rows are rounded up to the chips that share them"
    assert found["train", "tpu_flops"].detail["num_chips"] == SLICES[topology]
    assert found["prefill", "tpu_collective_bytes"].value == 0, "a batch split needs no traffic"
    kinds = found["train", "tpu_collective_bytes"].detail["kinds"]
    gathered = 512 * 128 + 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256  # every fsdp kernel once, in bfloat16
    assert 2 * gathered <= kinds["all-gather"]["result_bytes"] <= 2.2 * gathered
    assert found["train", "tpu_roofline_s"].value > 0
