"""Tensor-parallel decoding against one device."""

import collections
import re

import jax
import numpy as np
import pytest

from jaxbench import initial, sample, transformer
from jaxbench.gpu import packed_weights
from jaxbench.parallel import decoding
from jaxbench.parity.cases import GPT2, LLAMA
from jaxbench.quantization import weight_only

pytestmark = pytest.mark.usefixtures("plain_codegen")

WIDE = {"vocab_size": 512, "d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 8, "num_kv_heads": 4}
CONFIG = LLAMA.model_copy(update=WIDE)
CONFIGS = {"llama": CONFIG, "gpt2": GPT2.model_copy(update=WIDE | {"num_kv_heads": 8})}
NEW = 12


def prompts(rows):
    """Rows of one length and another."""
    random = np.random.default_rng(0)
    return [random.integers(0, CONFIG.vocab_size, 11 + row % 2).tolist() for row in range(rows)]


def tokens_of(generator, rows=1):
    """Tokens of a generator, prompts included."""
    return np.asarray(generator.decode(generator.prefill(prompts(rows), max_new_tokens=NEW, seed=3), NEW).tokens)


def generators(config, devices, *, dtype="float64", **sampling):
    """A generator on one device, and one over several."""
    params, made = initial.initial_params(config, 0, distinct=True), []
    for count in (1, devices):
        if count == 1:
            model, kind = transformer.build(config, params, dtype=dtype), sample.Generator
        else:
            model = decoding.build(config, params, decoding.attached("cpu", count), dtype=dtype)
            kind = decoding.Generator
        made.append(kind(model, eos_id=None, sampling=sample.SamplingParams(**sampling)))
    return made


@pytest.mark.parametrize(("name", "devices", "rows"), [("llama", 2, 1), ("llama", 4, 3), ("gpt2", 8, 1)])
def test_tokens_are_those_of_one_device(name, devices, rows):
    with jax.enable_x64(True):
        alone, together = generators(CONFIGS[name], devices)
        assert (tokens_of(alone, rows) == tokens_of(together, rows)).all()


def test_drawn_tokens_are_those_of_one_device():
    with jax.enable_x64(True):
        alone, together = generators(CONFIG, 2, temperature=1.0, top_p=0.9)
        assert (tokens_of(alone) == tokens_of(together)).all()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_packed_weights_are_split_and_decode_the_same_tokens(bits):
    packed, found = packed_weights.random_model(CONFIG, bits), []
    for count in (1, 2):
        model = weight_only.build(packed)
        if count > 1:
            decoding.split(model, CONFIG, jax.devices()[:count])
            codes = model.layers[0].attention.o_proj.codes[...]
            assert codes.sharding.shard_shape(codes.shape)[0] == codes.shape[0] // 2
        kind = sample.Generator if count == 1 else decoding.Generator
        found.append(tokens_of(kind(model, eos_id=None, sampling=sample.SamplingParams())))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("bits", ["float", "int8"])
def test_a_step_sums_over_devices_twice_a_layer_and_for_the_logits_and_gathers_the_embedding(bits):
    if bits == "float":
        model = transformer.build(CONFIG, initial.initial_params(CONFIG, 0))
    else:
        model = weight_only.build(packed_weights.random_model(CONFIG, bits))
    decoding.split(model, CONFIG, jax.devices()[:2])
    generator = decoding.Generator(model, eos_id=None, sampling=sample.SamplingParams())
    text = generator.compile(1, 16, NEW).decode.as_text()
    counted = collections.Counter(
        re.findall(r"(all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    )
    assert counted == {"all-reduce": 2 * CONFIG.num_layers + 1, "all-gather": 1}


def test_prompts_of_sizes_that_are_known_trace_nothing_again(monkeypatch):
    _, together = generators(CONFIG, 2, dtype="float32")
    first = tokens_of(together)

    def refuse(*_, **__):
        raise AssertionError("traced again")

    for name in ("_prefill", "_decode"):
        monkeypatch.setattr(together, name, refuse)
    assert (tokens_of(together) == first).all()


def test_fewer_devices_than_asked_for_are_refused():
    assert decoding.attached("cpu", 3) == jax.devices()[:3]
    with pytest.raises(ValueError, match="--tensor_parallel=9: JAX sees 8 devices of the kind cpu"):
        decoding.attached("cpu", 9)


def test_heads_that_the_devices_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_kv_heads=4 over 3 devices"):
        decoding.split(transformer.build(CONFIG, initial.initial_params(CONFIG, 0)), CONFIG, jax.devices()[:3])


def test_a_width_that_the_devices_do_not_divide_leaves_the_embedding_whole(x64):
    odd = CONFIG.model_copy(update={"d_model": 33, "d_ff": 65, "num_layers": 1})
    alone, together = generators(odd, 2)
    (embedding,) = [leaf for leaf in together._weights.leaves if leaf.shape == (odd.vocab_size, odd.d_model)]
    assert embedding.sharding.mesh.size == 2 and embedding.sharding.is_fully_replicated
    assert (tokens_of(alone) == tokens_of(together)).all()


def test_a_generator_of_a_decoder_that_is_not_split_is_refused():
    model = transformer.build(CONFIG, initial.initial_params(CONFIG, 0))
    with pytest.raises(ValueError, match="arrays lies on a mesh; call decoding.split first"):
        decoding.Generator(model, eos_id=None, sampling=sample.SamplingParams())
