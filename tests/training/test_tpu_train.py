"""A training configuration's step, compiled ahead of time for a TPU slice, in a process of its own."""

import json
import os
import subprocess
import sys
import types

import jax
import pytest

from jaxbench import config, initial
from jaxbench.measure import chips, tpu_compile
from jaxbench.measure.records import Record
from jaxbench.training import tpu_train
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

CONFIG = ROOT / "configs/lm/tpu_1b.yaml"
LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS = 2, 128, 512, 128, 8
TINY = (
    f"model.vocab_size={VOCABULARY}", f"model.d_model={WIDTH}", "model.d_ff=256", f"model.num_layers={LAYERS}",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=32", f"model.max_seq_len={LENGTH}",
    f"data.seq_len={LENGTH}", f"batch_size={ROWS}", "step.precision=float32", "implementation=dense",
    "scan_layers=false", "step.remat.policy=none", "model.tie_embeddings=false", "parallel.mesh.data=4",
    "parallel.mesh.fsdp=1", "parallel.mesh.model=1", "parallel.zero=0",
)  # fmt: skip
STEPS = {
    "full": (*TINY, "step.remat.policy=offload", 'step.remat.names=["input"]'),
    "bfloat16": (*TINY, "parallel.gradient_type=bfloat16"),
    "optimizer": (*TINY, "step.offload.optimizer=true"),
    "adapters": (*TINY, "lora.rank=4", "step.optimizer.trained=adapters", "model.num_layers=1"),
}
PROGRAM = """
import sys
from jaxbench import config
from jaxbench.measure import chips
from jaxbench.training import tpu_train
from jaxbench.training.train_config import TrainConfig
for changes in {steps!r}:
    settings = config.load({path!r}, changes, TrainConfig)
    for record in tpu_train.compile_step(settings, chips.parse_topology("v5e:2x2")):
        print(record.model_dump_json())
    print("-")
"""
COUNT = initial.num_parameters(config.load(CONFIG, TINY, TrainConfig).model.resolved(None))
needs_libtpu = pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")


@pytest.fixture(scope="module")
def compiled():
    """Compile the tiny steps for four chips; return each one's records by metric."""
    program = PROGRAM.format(steps=list(STEPS.values()), path=str(CONFIG))
    environment = os.environ | tpu_compile.ENVIRONMENT | {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Record]] = [{}]
    for line in done.stdout.splitlines():
        if line == "-":
            found.append({})
        else:
            record = Record.model_validate(json.loads(line))
            found[-1][record.metric.removeprefix("tpu_")] = record
    return dict(zip(STEPS, found))


@needs_libtpu
def test_bfloat16_halves_the_bytes_of_the_gradients_on_a_tpu(compiled):
    kinds = [compiled[name]["collective_bytes"].detail["kinds"] for name in ("full", "bfloat16")]
    full, half = (one["all-reduce"]["result_bytes"] for one in kinds)
    assert 0 <= full - 4 * COUNT <= 64  # loss and number of targets
    assert 0 <= half - 2 * COUNT <= 64


@needs_libtpu
def test_a_tpu_keeps_exactly_the_moments_and_the_blocks_inputs_in_host_memory(compiled):
    inputs, plain, moments = (compiled[name]["memory_bytes"].detail for name in ("full", "bfloat16", "optimizer"))
    assert (plain["host_argument"], plain["host_temp"]) == (0, 0)
    assert (inputs["host_argument"], inputs["host_temp"]) == (0, LAYERS * (ROWS // 4) * LENGTH * WIDTH * 4)
    assert moments["host_argument"] == 2 * 4 * COUNT
    assert 0 <= plain["argument"] - moments["argument"] - 2 * 4 * COUNT < 2**16


@needs_libtpu
def test_memory_flops_and_roofline_are_those_of_the_model(compiled):
    found = compiled["bfloat16"]
    memory, line = found["memory_bytes"], found["roofline_s"]
    assert memory.device == "v5e:2x2 data=4" and memory.detail["fits"]
    assert 12 * COUNT <= memory.detail["argument"] <= 12 * COUNT + 2**16  # parameters and two moments in float32
    multiplied = COUNT - VOCABULARY * WIDTH  # all but the embedding
    attention = 12 * LAYERS * 4 * 32 * LENGTH
    assert found["flops"].value == ROWS * LENGTH / 4 * (6 * multiplied + attention)
    assert line.value == max(line.detail[f"{name}_s"] for name in ("compute", "memory", "interconnect"))
    mfu = found["roofline_mfu"]
    assert mfu.value == pytest.approx(found["flops"].value / 197e12 / line.value)
    assert mfu.detail["causal"] / mfu.value == pytest.approx(1 - attention / 2 / (6 * multiplied + attention))


@needs_libtpu
def test_only_adapters_have_moments_where_they_alone_are_trained(compiled):
    frozen = initial.num_parameters(config.load(CONFIG, STEPS["adapters"], TrainConfig).model.resolved(None))
    adapters = 4 * (2 * WIDTH + WIDTH + WIDTH // 2)  # of q_proj and v_proj, whole on every chip
    argument = compiled["adapters"]["memory_bytes"].detail["argument"]
    assert 4 * frozen + 12 * adapters <= argument <= 4 * frozen + 12 * adapters + 2**16
    logits, weights = 16 * ROWS * LENGTH // 4 * VOCABULARY, 2 * 4 * (frozen + adapters)
    assert compiled["adapters"]["traffic_bytes"].value == logits + weights + 32 * adapters


# Without a compiler


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("block", 1)])
def test_a_pipeline_waits_for_its_slowest_stage(policy, again):
    changes = ["parallel.mesh.stage=4", "parallel.mesh.fsdp=1", "parallel.micro_batches=8", "batch_size=32"]
    changes += [f"step.remat.policy={policy}"]
    settings = config.load(CONFIG, changes, TrainConfig)
    step = tpu_train.Lowered(None, {"stage": 4, "data": 1, "fsdp": 1, "sequence": 1, "model": 4}, 10**8, 10**9)
    found = tpu_train.roofline(settings, chips.parse_topology("v5e:4x4"), step, sent_bytes=0)
    tokens = 32 * 2048
    head = 6 * tokens * 2048 * 49152 / 4  # of the last stage's chips
    layers = found["flops_per_chip"] * 4 - head  # of all four stages
    forward = layers / 3 / 4 / 8  # of a stage, a micro-batch
    # Three ticks fill the pipeline and three empty it; in the eight between, the last stage has the most to do.
    backward = (3 + again) * forward  # blocks that are rematerialised are computed once more
    longest = 3 * forward + 8 * (backward + head / 8) + 3 * backward
    assert found["compute_s"] == pytest.approx(longest / 197e12)
    # Every stage computes its forward again, the last one only in its backward pass.
    assert found["flops_done_per_chip"] == pytest.approx(found["flops_per_chip"] + layers / 3 / 4 * (3 / 4 + again))
    assert found["mfu"] == pytest.approx(found["flops_per_chip"] / longest)
    logits = 16 * tokens * 49152 / 16
    weights = (3 + again) * 8 * 2 * 10**9  # forward, forward again, backward
    assert found["traffic_bytes"] == pytest.approx(weights + 32 * 10**8 + logits)


def test_what_a_step_needs_is_named():
    slice_ = chips.parse_topology("v5e:4x4")
    with pytest.raises(ValueError, match="parallel is unset, the 16 chips need parallel.mesh"):
        tpu_train.lower_step(config.load(ROOT / "configs/lm/tiny.yaml", ["model.vocab_size=256"], TrainConfig), slice_)
    with pytest.raises(ValueError, match="model.vocab_size is unset and left to data.tokenizer=byte"):
        tpu_train.model_of(config.load(ROOT / "configs/lm/tiny.yaml", [], TrainConfig))


@pytest.mark.parametrize(
    "how", [("parallel.mesh.stage=2", "parallel.micro_batches=2"), ("parallel.gradient_type=float16",)]
)
def test_float8_is_refused_where_a_training_run_refuses_it(monkeypatch, how):
    monkeypatch.setattr(tpu_compile, "devices", lambda topology: jax.devices()[: topology.num_chips])
    settings = config.load(CONFIG, [*TINY, "parallel.mesh.data=-1", "step.precision=float8", *how], TrainConfig)
    with pytest.raises(ValueError, match="precision=float8 needs stage=1, micro_batches=1 and gradient_type=full, got"):
        tpu_train.lower_step(settings, chips.parse_topology("v5e:2x2"))


@pytest.mark.parametrize("output", ["/dev/null/a.jsonl", str(CONFIG)])
def test_an_output_that_cannot_be_written_is_refused_before_the_step_is_compiled(monkeypatch, output):
    given = {"output": output, "config": str(CONFIG), "topology": "v5e:2x2"}
    monkeypatch.setattr(tpu_train.flags, "FLAGS", types.SimpleNamespace(**given))
    monkeypatch.setattr(tpu_train, "compile_step", lambda *arguments: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=f"--output=(/dev/null|{CONFIG})"):
        tpu_train.report(config.load(CONFIG, TINY, TrainConfig))
