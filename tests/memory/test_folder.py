"""A decoder with memory as a folder: what is written is read back, what is damaged is one line, and it is served."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxbench import initial
from jaxbench.memory import folder
from jaxbench.memory.serving import MemoryEngineConfig, MemoryServerConfig
from jaxbench.pretrained import small_tokenizers
from jaxbench.serve.request import Request
from jaxbench.serve.settings import load_engine
from tests.memory.test_decoder import PLAIN, memory, with_memory

CONFIG = with_memory(PLAIN.model_copy(update={"vocab_size": 257, "max_seq_len": 48}), memory("mac", max_documents=1))


@pytest.fixture
def saved(tmp_path):
    params = initial.initial_params(CONFIG, 0, distinct=True)
    return folder.save(tmp_path / "model", CONFIG, params, tokenizer=small_tokenizers.ByteTokenizer())


def test_what_is_written_is_read_back(saved):
    found = folder.load(saved)
    assert folder.is_memory(saved) and folder.read_config(saved) == found.config == CONFIG
    for name, value in initial.initial_params(CONFIG, 0, distinct=True).items():
        np.testing.assert_array_equal(found.params[name], value)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda values: values.pop("layers.1.block.attention.q_proj.kernel"), "missing: layers.1.block.attention"),
        (lambda values: values.update(more=np.zeros(2)), "unused: more"),
        (lambda values: values["embed.embedding"].fill(np.nan), "not finite in embed.embedding"),
    ],
)
def test_a_damaged_folder_is_one_line_with_the_tensors_name(saved, damage, words):
    values = load_file(saved / "model.safetensors")
    damage(values)
    save_file(values, saved / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        folder.load(saved)


def test_a_folder_of_another_kind_or_one_that_is_full_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        folder.save(saved, CONFIG, initial.initial_params(CONFIG, 0, distinct=True))
    (saved / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not folder.is_memory(saved) and not folder.is_memory(tmp_path / "none")
    with pytest.raises(ValueError, match="model_type is 'llama', wanted 'jaxbench_memory'"):
        folder.read_config(saved)


def test_both_backends_serve_it_alike(saved):
    tokens = []
    for backend in ("flax", "torch"):
        limits = {"max_running": 2, "max_batch_tokens": 32}
        engine = load_engine(
            MemoryEngineConfig(
                model=str(saved), backend=backend, kernels="xla", segment=8, cache_tokens=128, limits=limits
            )
        )
        assert engine.runner.num_blocks == 3 and engine.runner.cache_bytes > 10_000
        events = engine.generate([Request(f"r{i}", tuple(range(9 * i + 3)), 8) for i in range(3)])
        tokens.append({name: [each.token for each in found] for name, found in events.items()})
    assert tokens[0] == tokens[1]


def test_a_cache_without_room_for_one_request_is_refused(saved):
    config = MemoryEngineConfig(model=str(saved), kernels="xla", segment=8)
    with pytest.raises(ValueError, match="cache_tokens=32: wanted at least the 48 of one request"):
        load_engine(config.model_copy(update={"cache_tokens": 32}))
    engine = load_engine(config.model_copy(update={"slot_tokens": 16}))
    with pytest.raises(ValueError, match="wanted at least 1 new one and 16 together"):
        engine.add(Request("a", (1,) * 10, 7))
    assert MemoryServerConfig(engine={"kernels": "xla"}).engine.segment == 64
