"""Decoders on native kernels: every family computes what its ordinary layers compute, whatever the batch,
parts, threads and framework.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import initial, sample, transformer
from jaxbench.config import TransformerConfig
from jaxbench.native import calls, checkpoint, formats, library, run
from jaxbench.native import model as native_model
from jaxbench.parity import cases
from jaxbench.prompts import SamplingParams

if not library.is_available():
    pytest.skip("native kernels need a C compiler", allow_module_level=True)

LLAMA = TransformerConfig(**(cases.LLAMA.model_dump() | {"d_ff": 64, "dropout": 0.0, "max_seq_len": 512}))
FAMILIES = {
    "llama": {},
    "gpt2": {key: value for key, value in cases.GPT2.model_dump().items() if value != cases.LLAMA.model_dump()[key]},
    "qwen2": {"qkv_bias": True},
    "qwen3": cases.QWEN3,
    "gemma2": cases.GEMMA2,
    "gemma3": cases.GEMMA3 | {"global_every": 2},
    "window": {"sliding_window": 7, "head_dim": 20, "num_kv_heads": 1, "tie_embeddings": False},
}
BACKENDS = {
    "flax": ("jaxbench.native.model", "jaxbench.sample"),
    "equinox": ("jaxbench.eqx.native.model", "jaxbench.sample"),
    "torch": ("torch_ref.native.model", "torch_ref.sample"),
}
PROMPTS = [[5, 9, 2, 40, 11], [7] * 12, [1, 2, 3, 4, 5, 6, 7, 8]]


def config_of(family: str) -> TransformerConfig:
    """Tiny configuration of a family."""
    return TransformerConfig(**(LLAMA.model_dump() | FAMILIES[family]))


@functools.cache
def packed_of(family: str, weights: str = "float32") -> checkpoint.PackedCheckpoint:
    """Its random weights, packed."""
    config = config_of(family)
    return checkpoint.pack_params(config, initial.initial_params(config, 0, distinct=True), weights_as=weights)


def rows_of(family: str, weights: str) -> dict[str, np.ndarray]:
    """Parameters that packed weights stand for, float64, kernels (in, out)."""
    params = initial.initial_params(config_of(family), 0, distinct=True)
    out = {}
    for name, value in params.items():
        value = np.asarray(value, np.float32)
        is_embedding = name == "embed.embedding"
        if is_embedding or name.endswith(".kernel"):
            rows = checkpoint.quantized(value if is_embedding else value.T, weights)
            value = formats.dequantized(rows) if is_embedding else formats.dequantized(rows).T
        out[name] = value.astype(np.float64)
    return out


def logits_of(model, tokens: np.ndarray, *, prompt: int) -> np.ndarray:
    """Logits of every token, the first `prompt` of them in one call, the others one by one through the cache."""
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))

    @jax.jit
    def step(tokens, positions, cache):
        hidden, cache = model.features(tokens, positions, cache=cache)
        return model.logits(hidden), cache

    hidden, cache = jax.jit(lambda t, p: model.features(t, p))(tokens[:, :prompt], positions[:, :prompt])
    out, cache = [np.asarray(model.logits(hidden))], cache.padded(tokens.shape[1], dtype=model.cache_dtype)
    for i in range(prompt, tokens.shape[1]):
        logits, cache = step(tokens[:, i : i + 1], positions[:, i : i + 1], cache)
        out.append(np.asarray(logits))
    return np.concatenate(out, axis=1)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Relative distance of a to b, 2-norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Two rows of tokens."""
    return np.random.default_rng(0).integers(0, LLAMA.vocab_size, (2, 14)).astype(np.int32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_its_float64_layers_compute_on_the_same_numbers(family, tokens):
    with jax.enable_x64(True):
        exact = transformer.build(config_of(family), rows_of(family, "float32"), dtype="float64")
        positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
        reference = np.asarray(jax.jit(exact)(tokens, positions))
    model = native_model.build(packed_of(family))
    assert relative(logits_of(model, tokens, prompt=9), reference) < 1e-6


@pytest.mark.parametrize("weights", formats.FORMATS)
def test_every_format_computes_with_the_numbers_it_stands_for(weights, tokens):
    with jax.enable_x64(True):
        exact = transformer.build(LLAMA, rows_of("llama", weights), dtype="float64")
        positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
        reference = np.asarray(jax.jit(exact)(tokens, positions))
    packed = packed_of("llama", weights)
    assert relative(logits_of(native_model.build(packed), tokens, prompt=9), reference) < 1e-6
    if weights != "float32":
        kind = "bfloat16" if weights == "bfloat16" else "int8"
        narrow = logits_of(native_model.build(packed, activations=kind), tokens, prompt=9)
        assert 1e-5 < relative(narrow, reference) < 0.03, "activations of 8 bits, or bfloat16"


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_a_token_has_the_same_bits_whatever_its_batch_its_part_and_the_threads(cache, tokens):
    packed = packed_of("llama", "q4_1")
    whole = logits_of(native_model.build(packed, cache_dtype=cache), tokens, prompt=9)
    alone = logits_of(native_model.build(packed, cache_dtype=cache, threads=1), tokens[1:], prompt=9)
    step_by_step = logits_of(native_model.build(packed, cache_dtype=cache), tokens, prompt=1)
    assert np.array_equal(whole[1:], alone)
    assert np.array_equal(whole, step_by_step)


@pytest.mark.parametrize("window", [None, 40])
def test_a_long_text_has_the_same_bits_in_one_prompt_and_token_by_token(window):
    config = LLAMA.model_copy(update={"sliding_window": window})
    params = initial.initial_params(config, 0, distinct=True)
    model = native_model.build(checkpoint.pack_params(config, params, weights_as="float32"), cache_dtype="bfloat16")
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, 140)).astype(np.int32)
    assert np.array_equal(logits_of(model, tokens, prompt=140), logits_of(model, tokens, prompt=1))


def test_long_prompts_go_through_in_parts(monkeypatch):
    tokens = np.random.default_rng(1).integers(0, LLAMA.vocab_size, (2, 150)).astype(np.int32)
    model = native_model.build(packed_of("llama"))
    whole = logits_of(model, tokens, prompt=150)
    monkeypatch.setattr(run, "PART_ROWS", 64)
    assert np.array_equal(logits_of(model, tokens, prompt=150), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_all_frameworks_generate_the_same_tokens_as_without_native_kernels(family):
    config = config_of(family)
    params = {name: value * (1 if value.ndim == 1 else 3) for name, value in rows_of(family, "float32").items()}
    packed = checkpoint.pack_params(config, params, weights_as="float32")
    sampling = SamplingParams(temperature=0.8, top_k=20)
    plain = sample.Generator(transformer.build(config, params), eos_id=3, sampling=sampling)
    wanted = plain(PROMPTS, max_new_tokens=12, seed=4).tokens
    for module, generator in BACKENDS.values():
        model = importlib.import_module(module).build(packed)
        made = importlib.import_module(generator).Generator(model, eos_id=3, sampling=sampling)
        assert np.array_equal(made(PROMPTS, max_new_tokens=12, seed=4).tokens, wanted), module


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_past_the_models_context_are_not_computed_with_those_of_others(family):
    config = config_of(family).model_copy(update={"max_seq_len": 16})
    packed = checkpoint.pack_params(config, initial.initial_params(config, 0), weights_as="float32")
    tokens, positions = np.full((1, 20), 3, np.int32), np.arange(20, dtype=np.int32)[None]
    hidden = np.asarray(native_model.build(packed).features(jnp.asarray(tokens), jnp.asarray(positions))[0])
    assert np.isfinite(hidden[0, :16]).all() and np.isnan(hidden[0, 16:]).all()
    twin = importlib.import_module("torch_ref.native.model").build(packed)
    with pytest.raises(IndexError):
        twin.features(torch.from_numpy(tokens), torch.from_numpy(positions))


def test_a_row_that_is_padding_is_left_alone_and_says_nothing_to_others():
    model = native_model.build(packed_of("llama"))
    tokens = np.array([[4, 5, 6, 7], [8, 9, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 3], [0, 1, -1, -1]], np.int32)
    hidden, cache = model.features(tokens, positions)
    alone, _ = model.features(tokens[1:, :2], positions[1:, :2])
    assert np.array_equal(np.asarray(hidden)[1:, :2], np.asarray(alone))
    assert not np.asarray(cache.keys[0])[1, :, :, 2:].any()


def test_nan_in_one_row_shows_there_and_nowhere_else():
    packed = packed_of("llama")
    config = packed.config
    layer = native_model.build(packed).weights.layers[0]
    x = np.random.default_rng(0).normal(size=(3, config.d_model)).astype(np.float32)
    clean = np.asarray(_block(layer, config, x)[0])
    x[1, 5] = np.nan
    dirty = np.asarray(_block(layer, config, x)[0])
    assert np.isnan(dirty[1]).all() and np.array_equal(dirty[[0, 2]], clean[[0, 2]])


def _block(layer, config, x, positions=(0, 0, 0), table=((0,), (1,), (2,)), dtype="float32"):
    pages, none = jnp.zeros((3, config.num_kv_heads, 64, 16), dtype), jnp.zeros((0,), jnp.float32)
    keys = pages.swapaxes(2, 3)
    angles = (jnp.ones((len(x), config.head_dim // 2)), jnp.zeros((len(x), config.head_dim // 2)))
    return calls.blocks(
        jnp.asarray(x), jnp.asarray(positions, jnp.int32), angles, None, (layer,),
        ((keys,), (pages,), (none,), (none,)), jnp.asarray(table, jnp.int32), (config,), checkpoint.Settings(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": (0, 64, 0)}, "row 1: position 64, but its pages hold 64"),
        ({"table": ((0,), (7,), (2,))}, "row 1: page 7 of 3"),
    ],
)
def test_positions_and_pages_outside_the_cache_are_refused(arguments, message):
    packed = packed_of("llama")
    layer = native_model.build(packed).weights.layers[0]
    x = np.zeros((3, packed.config.d_model), np.float32)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(_block(layer, packed.config, x, **arguments))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_dtype": "float16"}, "cache_dtype='float16' is not one of float32, bfloat16, int8"),
        ({"activations": "int4"}, "activations='int4' is not one of float32, int8, bfloat16"),
        ({"activations": "bfloat16"}, "activations=bfloat16 go with weights in bfloat16"),
        ({"threads": -1}, "threads=-1, wanted at least 0"),
    ],
)
def test_unknown_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        native_model.build(packed_of("llama"), **settings)


def test_a_width_that_groups_do_not_divide_is_named():
    config = LLAMA.model_copy(update={"d_ff": 48})
    params = initial.initial_params(config, 0)
    with pytest.raises(ValueError, match="weights=q4_0: groups of 32 do not divide the model's d_ff=48"):
        checkpoint.pack_params(config, params, weights_as="q4_0")


def test_the_default_model_packs_its_own_numbers():
    packed = checkpoint.load()
    found = {matrix.format for matrix in packed.matrices.values()}
    assert found == {"q4_1", "q8_0"} and packed.config.num_layers == 30
    assert 95e6 < packed.weight_bytes < 98.5e6


def test_positions_of_64_bits_are_the_positions_they_say(tokens):
    model = native_model.build(packed_of("llama"))
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    wanted = np.asarray(model.features(tokens, positions)[0])
    with jax.enable_x64(True):
        found = model.features(jnp.asarray(tokens), jnp.asarray(positions.astype(np.int64)))[0]
    assert np.array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize(
    ("rows", "dtype", "message"),
    [
        (2, "float16", "cache of float16, wanted one of float32, bfloat16, int8"),
        (1, "float32", "12 positions and 6 lines of a page table for 12 rows"),
        (3, "float32", "12 positions and 18 lines of a page table for 12 rows"),
    ],
)
@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_a_cache_of_another_type_or_batch_is_refused_by_both_twins(package, rows, dtype, message):
    model = importlib.import_module(f"{package}.native.model").build(packed_of("llama"))
    cache = importlib.import_module(f"{package}.native.paged").empty(LLAMA, rows, 64, dtype)
    tokens, positions = np.ones((2, 6), np.int32), np.tile(np.arange(6, dtype=np.int32), (2, 1))
    if package == "torch_ref":
        tokens, positions = torch.tensor(tokens), torch.tensor(positions)
    with pytest.raises(ValueError, match=message):
        model.features(tokens, positions, cache=cache)


def test_pages_of_another_type_are_refused_by_the_handler_itself(monkeypatch):
    packed = packed_of("llama")
    layer = native_model.build(packed).weights.layers[0]
    monkeypatch.setattr(library, "check_rows", lambda *sizes: None)
    x = np.zeros((3, packed.config.d_model), np.float32)
    with pytest.raises(Exception, match="pages are not float32, bfloat16 or int8"):
        jax.block_until_ready(_block(layer, packed.config, x, dtype="float16"))


def test_two_threads_run_two_models_in_pytorch():
    from concurrent.futures import ThreadPoolExecutor

    from torch_ref.native import model as torch_model

    models = [torch_model.build(packed_of(family), threads=1) for family in ("llama", "qwen2")]
    tokens, positions = torch.ones((2, 40), dtype=torch.int32), torch.arange(40).expand(2, 40)
    wanted = [model.features(tokens, positions)[0] for model in models]

    def is_same(i: int) -> bool:
        return all(torch.equal(models[i].features(tokens, positions)[0], wanted[i]) for _ in range(30))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(is_same, (0, 1))) == [True, True]
