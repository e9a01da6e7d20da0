"""Readers on several devices, and with blocks in the host's memory: the same features to the bit."""

import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import extract, layout, placement, reader_settings
from jaxbench.hallucination.bulk import run
from jaxbench.hallucination.detect import HallucinationDetector
from jaxbench.hallucination.features import FeatureReader
from jaxbench.hallucination.where import Where
from jaxbench.measure import tpu_compile
from jaxbench.parameters import dotted
from jaxbench.pretrained import weights
from tests.hallucination import small
from tests.structure import ROOT
from torch_ref import transformer as torch_transformer
from torch_ref.hallucination import features as torch_features
from torch_ref.hallucination import placement as torch_placement

DEEP = TransformerConfig(
    vocab_size=257, d_model=32, d_ff=64, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, max_seq_len=128
)
BLOCK = 7  # matrices of it
SIDES = {
    "flax": (transformer, placement, FeatureReader),
    "torch": (torch_transformer, torch_placement, torch_features.FeatureReader),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    return small.write(folder / "data"), small.model(folder / "model")


def files(place, folder, where: Where, package="jaxbench") -> dict[str, bytes]:
    """Return the features of all responses, by name."""
    settings = small.settings(place[1])
    store = extract.Store(folder, settings, weights.checksum(place[1]))
    work = extract.groups(small.items(place[0]), store)
    assert sum(extract.run_by_device(work, settings, store, package=package, where=where)) == 4
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return files(place, tmp_path_factory.mktemp("alone"), Where("cpu", 1))


# Several devices


def test_any_number_of_devices_reads_the_same_bits(place, alone, tmp_path):
    assert files(place, tmp_path, Where("cpu", 3)) == alone


def test_every_device_holds_all_weights(place):
    readers = extract.load_readers(small.settings(place[1]), package="jaxbench", where=Where("cpu"))
    found = [{leaf.device for leaf in jax.tree.leaves(each.feature_reader._state)} for each in readers]
    assert found == [{device} for device in jax.local_devices()] and len(found) == 8


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_more_devices_than_there_are_are_refused(place, package):
    with pytest.raises(ValueError, match="--devices=99: (JAX|PyTorch) sees [18] of kind cpu"):
        extract.load_readers(small.settings(place[1]), package=package, where=Where("cpu", 99))


def test_verdicts_by_several_devices_are_the_same_bytes(made, tmp_path):
    *_, path, _, model = made
    rows = [("Rain fell over Lisbon.", "", "Snow fell."), ("The mill is old.", "When?", "It is old, in 1820.")]
    rows += [(context, question, "Two roads were closed until noon.") for context, question, _ in rows]
    text = "".join(json.dumps(dict(zip(("context", "question", "response"), row))) + "\n" for row in rows)
    (tmp_path / "i.jsonl").write_text(text)
    found = []
    for name, where in (("a", None), ("b", Where("cpu", 2))):
        detector = HallucinationDetector(path, model=model, where=where)
        outputs = run.Outputs.of(output=str(tmp_path / f"{name}.jsonl"))
        part, total = run.check(str(tmp_path / "i.jsonl"), str(path), outputs)
        assert sum(map(len, run.detect(detector, tmp_path / "i.jsonl", part))) == total == 4
        run.finish(tmp_path / "i.jsonl", part, outputs, detector)
        found.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert found[0] == found[1]


# Blocks in the host's memory


@functools.cache
def built(side: str, dtype: str):
    return SIDES[side][0].build(DEEP, initial.initial_params(DEEP, 0, distinct=True), dtype=dtype)


def on(side: str, device, offload_layers: int, dtype: str = "bfloat16"):
    """Return a reader on a device."""
    return SIDES[side][2](
        SIDES[side][1].placed(built(side, dtype), device, offload_layers=offload_layers), state_layer=1
    )


def texts():
    """Return arrays of a prompt, of a row of two responses, and of slots."""
    ids = np.random.default_rng(0).integers(0, 257, 120).tolist()
    text = layout.Text(ids[:60], range(5, 50))
    prompts = layout.prompt_arrays([text], share=0.1)
    rows = layout.response_arrays([text], [[ids[60:80], ids[80:]]])
    return prompts, rows, np.arange(rows.tokens.size, dtype=np.int32)


def read(reader) -> dict[str, np.ndarray]:
    """Return everything that a reader says of `texts`."""
    prompts, rows, slots = texts()
    prompt = reader.read_prompt(prompts)
    without = {f"{name}_without": value for name, value in reader.surprise(prompt, rows).items()}
    return reader.scores(prompt, prompts, rows, slots, 8) | without


@pytest.mark.parametrize(("side", "dtype"), [("flax", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")])
def test_blocks_in_the_hosts_memory_change_no_bit_of_a_feature(side, dtype):
    device = jax.devices()[0] if side == "flax" else torch.device("cpu")
    wanted, found = read(on(side, device, 0, dtype)), read(on(side, device, 2, dtype))
    assert wanted.keys() == found.keys() and len(wanted) == 9
    for name, value in wanted.items():
        assert np.isfinite(value).all() and value.any()
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_nor_do_all_of_them_on_several_devices_in_float32(place, alone, tmp_path):
    assert files(place, tmp_path, Where("cpu", 2, offload_layers=1)) == alone


def test_a_program_takes_the_last_blocks_from_the_hosts_memory_and_copies_them_inside_loops():
    reader = on("flax", jax.devices()[1], 2)
    state = jax.tree_util.tree_leaves_with_path(reader._state)
    far = {dotted(path) for path, leaf in state if leaf.sharding.memory_kind == "pinned_host"}
    assert len(far) == 2 * BLOCK and {name.split(".")[1] for name in far} == {"1", "2"}
    assert all(leaf.device == jax.devices()[1] for _, leaf in state)
    prompts = texts()[0]
    arrays = (prompts.tokens, prompts.positions, prompts.is_context)
    lowered = reader._read.lower(reader._state, *arrays)
    arguments = lowered.compile().as_text().split("entry_computation_layout={(")[1].split(")->")[0]
    assert arguments.count("S(5)") == 2 * BLOCK  # XLA's number of the host's memory
    on_chips = reader._read.trace(reader._state, *arrays).lower(lowering_platforms=("tpu",))
    main, inside = on_chips.as_text().split("stablehlo.while", 1)  # a CPU's program has no copy: its memories are one
    assert "annotate_device_placement" in inside and "annotate_device_placement" not in main


def test_the_twins_blocks_lie_on_the_host_and_move_for_their_call():
    reader = on("torch", torch.device("cpu"), 1)
    block = reader._model.layers[2]
    away = block.mlp._near(torch.empty(0, device="meta"))
    assert {value.device.type for value in away.parameters()} == {"meta"}
    assert {value.device.type for value in block.mlp.parameters()} == {"cpu"}
    assert away.down_proj.kernel.shape == block.mlp.module.down_proj.kernel.shape


class Device:
    """A device without pinned memory."""

    device_kind = "abacus"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "beads"})]


@pytest.mark.parametrize("side", SIDES)
def test_more_blocks_than_there_are_and_a_device_without_such_memory_are_refused(side):
    for number in (-1, 4):
        with pytest.raises(ValueError, match=f"offload_layers={number}: the model has 3 blocks"):
            SIDES[side][1].arranged(built(side, "bfloat16"), offload_layers=number)
    if side == "flax":
        with pytest.raises(ValueError, match="offload_layers=1: abacus reads no pinned_host memory, but beads"):
            placement.placed(built(side, "bfloat16"), Device(), offload_layers=1)


def test_where_a_reader_runs_is_no_part_of_the_features_name():
    assert not set(Where._fields) & set(reader_settings.ReaderSettings.model_fields)
    assert not {"where.py", "placement.py"} & set(extract.CODE)


# A TPU's program, compiled by libtpu

TPU = """
import json, sys
from jaxbench.config import TransformerConfig
from jaxbench.hallucination.study import reader_memory
from jaxbench.measure import chips
model = TransformerConfig(
    vocab_size=512, d_model=512, d_ff=2048, num_layers=6, num_heads=4, num_kv_heads=4, head_dim=128, max_seq_len=128
)
for layers in (0, 6):
    found = reader_memory.compile_programs(
        model, chips.parse_topology("v5e:2x2"), dtype="bfloat16", prompt_slots=64, row_slots=64, offload_layers=layers
    )
    print(json.dumps(next(found)))
"""


@pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")
def test_a_tpu_holds_the_offloaded_blocks_one_or_two_at_a_time():
    environment = os.environ | tpu_compile.ENVIRONMENT | {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", TPU]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, offloaded = map(json.loads, done.stdout.splitlines())
    block = 2 * (4 * 512 * 512 + 3 * 512 * 2048)
    assert whole["argument"] - offloaded["argument"] == offloaded["host_argument"] == 6 * block
    assert whole["host_argument"] == 0
    assert offloaded["temp"] - whole["temp"] < 2 * block
