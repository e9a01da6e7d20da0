"""The decoder: causality, caching, padding, packing, scanning, dtypes, and equal programs in Flax and Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import functional, initial, nn, train, transformer
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.eqx import nn as eqx_nn
from jaxbench.eqx import transformer as eqx_transformer
from jaxbench.parity import cases
from torch_ref import nn as torch_nn
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer

B, T = 2, 16
LLAMA = TransformerConfig(
    vocab_size=61,
    d_model=32,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=32,
    dropout=0.1,
)
QWEN3 = LLAMA.model_copy(update={"qk_norm": True, "head_dim": 16, "rope_theta": 1e6, "norm_eps": 1e-6})
GPT2 = LLAMA.model_copy(
    update={
        "norm": "layernorm",
        "activation": "gelu",
        "position": "learned",
        "use_bias": True,
        "num_kv_heads": 4,
        "tie_embeddings": False,
    }
)
GEMMA3 = LLAMA.model_copy(update=cases.GEMMA3 | {"global_every": 2})
PARAMS = initial.initial_params(LLAMA, 0, distinct=True)
POSITIONS = np.tile(np.arange(T, dtype=np.int32), (B, 1))


@pytest.mark.parametrize("options", [{}, {"implementation": "blocked", "block_size": 4}], ids=["dense", "blocked"])
@pytest.mark.parametrize("backend", ["flax", "equinox", "torch", "torch-fused"])
def test_only_in_an_encoder_a_token_sees_those_behind_it(backend, options):
    if backend == "torch-fused":
        options = {"implementation": "fused"}
    build = {"flax": transformer, "equinox": eqx_transformer}.get(backend, torch_transformer).build
    as_array = torch.from_numpy if backend.startswith("torch") else jnp.asarray
    tokens = np.random.default_rng(0).integers(0, 61, (B, T)).astype(np.int32)
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    positions = POSITIONS.copy()
    positions[1, -1] = -1  # of the second row it is padding
    for is_causal in (True, False):
        model = build(LLAMA.model_copy(update={"is_causal": is_causal}), PARAMS, **options)
        with torch.no_grad():
            one, other = (np.asarray(model(*map(as_array, (each, positions)))) for each in (tokens, changed))
        is_seen = np.abs(one - other)[:, :-1].max(axis=(1, 2)) > 0
        np.testing.assert_array_equal(is_seen, [not is_causal, False])


def test_an_encoder_has_no_window():
    with pytest.raises(ValueError, match="is_causal=False goes with no sliding_window, got 4"):
        TransformerConfig(**(LLAMA.model_dump() | {"is_causal": False, "sliding_window": 4}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"position": "learned", "rope_scaling": {"kind": "yarn", "factor": 4}},
            "rope_scaling=yarn needs rotary posit",
        ),
        ({"rope_theta": 1, "rope_scaling": {"kind": "yarn", "factor": 4}}, "yarn with rope_theta=1.0 is not supported"),
        (
            {"rope_scaling": {"kind": "llama3", "factor": 4, "low_freq_factor": 4}},
            "llama3 with low_freq_factor=4.0 and high_freq_factor=4.0, wanted low < high",
        ),
        ({"rope_scaling": {"kind": "llama3", "factor": 4, "low_freq_factor": -1}}, "greater than 0"),
    ],
)
def test_rotary_scalings_that_cannot_be_computed_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**(LLAMA.model_dump() | changed))


@pytest.fixture(scope="module")
def forward():
    """Return the jitted Llama forward pass (tokens, positions, segments) -> logits."""
    graph, state = nnx.split(transformer.build(LLAMA, PARAMS))

    @jax.jit
    def run(tokens, positions, segments):
        return nnx.merge(graph, state)(tokens, positions, segments=segments)

    return run


def random_tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, (B, T), dtype=np.int32)


@given(st.integers(0, 1000), st.integers(1, T - 1))
def test_later_tokens_do_not_change_earlier_logits(forward, seed, cut):
    tokens, segments = random_tokens(seed), np.zeros((B, T), np.int32)
    changed = tokens.copy()
    changed[:, cut:] = (changed[:, cut:] + 1) % LLAMA.vocab_size
    before, after = (np.asarray(forward(x, POSITIONS, segments)) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :cut], after[:, :cut])
    assert np.abs(before[:, cut] - after[:, cut]).max() > 1e-3


@given(st.integers(0, 1000), st.integers(1, T - 1))
def test_a_packed_document_equals_the_document_alone(forward, seed, cut):
    tokens, segments = random_tokens(seed), np.zeros((B, T), np.int32)
    packed_positions, packed_segments = POSITIONS.copy(), segments.copy()
    packed_positions[:, cut:] -= cut
    packed_segments[:, cut:] = 1
    packed = np.asarray(forward(tokens, packed_positions, packed_segments))
    alone_tokens = np.zeros_like(tokens)
    alone_tokens[:, : T - cut] = tokens[:, cut:]
    alone_positions = np.where(POSITIONS < T - cut, POSITIONS, -1)
    alone = np.asarray(forward(alone_tokens, alone_positions, segments))
    np.testing.assert_allclose(packed[:, cut:], alone[:, : T - cut], atol=2e-5)


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2, GEMMA3], ids=["llama", "qwen3", "gpt2", "gemma3"])
def test_prefill_then_cached_steps_equal_the_whole_pass(config):
    graph, state = nnx.split(transformer.build(config, initial.initial_params(config, 0, distinct=True)))

    @jax.jit
    def step(tokens, positions, cache, slot):
        model = nnx.merge(graph, state)
        hidden, cache = model.features(tokens, positions, cache=cache, slot=slot)
        return model.logits(hidden), cache

    tokens = random_tokens(3)
    whole = jax.jit(lambda t, p: nnx.merge(graph, state)(t, p))(tokens, POSITIONS)
    _, cache = jax.jit(lambda t, p: nnx.merge(graph, state).features(t, p))(tokens[:, :10], POSITIONS[:, :10])
    cache = cache.padded(20, dtype="float32")
    for t in range(10, T):
        logits, cache = step(tokens[:, t : t + 1], POSITIONS[:, t : t + 1], cache, t)
        np.testing.assert_allclose(np.asarray(logits[:, 0]), np.asarray(whole[:, t]), atol=2e-5)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_torch_with_its_own_attention_kernel_and_no_mask_computes_flaxs_function_in_float64(config, x64):
    config = config.model_copy(update={"dropout": 0.0})
    params, tokens = initial.initial_params(config, 0, distinct=True), random_tokens(4)
    weights = np.random.default_rng(0).standard_normal((B, T, config.vocab_size))
    graph, state = nnx.split(transformer.build(config, params, dtype="float64"))

    @jax.jit
    @jax.grad
    def gradients(state):
        return (nnx.merge(graph, state)(tokens, POSITIONS) * weights).sum()

    wanted = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients(state))}
    model = torch_transformer.build(config, params, dtype="float64", implementation="fused")
    logits = model(torch.from_numpy(tokens), None)
    (logits * torch.from_numpy(weights)).sum().backward()
    flax = jax.jit(lambda state: nnx.merge(graph, state)(tokens, POSITIONS))(state)
    np.testing.assert_allclose(logits.detach().numpy(), flax, rtol=0, atol=1e-12 * np.abs(flax).max())
    found = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    largest = max(
        np.abs(gradient).max() for gradient in wanted.values()
    )  # that of a key's bias is zero but for rounding
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=0, atol=1e-13 * largest, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"implementation": "blocked", "block_size": 4}], ids=["dense", "blocked"])
@pytest.mark.parametrize("config", [LLAMA.model_copy(update={"sliding_window": 5}), GPT2], ids=["window", "learned"])
@pytest.mark.parametrize("backend", ["flax", "equinox", "torch"])
def test_without_positions_a_row_is_one_document_that_counts_from_0(backend, config, options):
    build = {"flax": transformer, "equinox": eqx_transformer, "torch": torch_transformer}[backend].build
    library, as_array = (torch_train, torch.from_numpy) if backend == "torch" else (train, jnp.asarray)
    model = build(config, initial.initial_params(config, 0, distinct=True), **options)
    tokens, targets = (as_array(random_tokens(seed)) for seed in (5, 6))
    mask = as_array(np.random.default_rng(7).random((B, T)) < 0.8)

    def computed(model, positions):
        batch = library.Batch(tokens, targets, positions, mask)
        return library.predict(model, batch), library.loss_fn(model, batch)

    if backend == "equinox":
        computed = eqx.filter_jit(computed)
    elif backend == "flax":
        computed = nnx.jit(computed)
    with torch.no_grad():
        found, wanted = (computed(model, positions) for positions in (None, as_array(POSITIONS)))
    np.testing.assert_allclose(np.asarray(found[0]), np.asarray(wanted[0]), rtol=0, atol=1e-6)
    assert float(found[1]) == pytest.approx(float(wanted[1]), rel=1e-6)


@pytest.mark.parametrize("module", [transformer, eqx_transformer], ids=["flax", "equinox"])
def test_a_call_without_positions_has_neither_cache_nor_segments(module):
    model, tokens = module.build(LLAMA, PARAMS), jnp.asarray(random_tokens(0))
    with pytest.raises(ValueError, match="no positions with cache=False, segments=True; wanted neither"):
        model(tokens, None, segments=jnp.zeros_like(tokens))
    _, cache = model.features(tokens, None)
    np.testing.assert_array_equal(cache.positions, POSITIONS)  # a call with positions can go on from here
    with pytest.raises(ValueError, match="no positions with cache=True, segments=False; wanted neither"):
        model.features(tokens[:, :1], None, cache=cache.padded(20, dtype="float32"), slot=T)


@pytest.mark.parametrize("backend", ["flax", "equinox", "torch", "torch-plain"])
def test_a_cached_call_has_no_segments_and_its_tokens_fit_behind_the_slot(backend):
    build = {"flax": transformer, "equinox": eqx_transformer}.get(backend, torch_transformer).build
    as_array = torch.from_numpy if backend.startswith("torch") else jnp.asarray
    model, tokens, positions = build(LLAMA, PARAMS), as_array(random_tokens(0)), as_array(POSITIONS)
    given = None if backend == "torch-plain" else positions[:, :2]
    with torch.inference_mode():
        _, cache = model.features(tokens[:, :2], given)
        cache = cache.padded(5, dtype="float32")
        wanted = "no positions with segments=True" if given is None else r"features: segments \(2, 2\) with a cache"
        with pytest.raises(ValueError, match=wanted):
            model.features(tokens[:, 2:4], given, cache=cache, slot=2, segments=positions[:, :2])
        for slot in (4, 5, -1):
            with pytest.raises(ValueError, match=f"2 tokens from slot={slot} on do not fit a cache of 5 slots"):
                model.features(tokens[:, 2:4], given, cache=cache, slot=slot)
        _, cache = model.features(tokens[:, 2:4], given, cache=cache, slot=3)
    if given is not None:
        np.testing.assert_array_equal(cache.positions, [[0, 1, -1, 0, 1]] * 2)


def test_a_call_without_positions_takes_a_cache_without_them_and_no_segments():
    model = torch_transformer.build(LLAMA, PARAMS)
    tokens, positions = torch.from_numpy(random_tokens(0)), torch.from_numpy(POSITIONS)
    with torch.inference_mode():
        caches = [model.features(tokens, given)[1] for given in (None, positions)]
        with pytest.raises(ValueError, match="no positions with segments=True"):
            model(tokens, None, segments=torch.zeros_like(tokens))
        with pytest.raises(ValueError, match="a cache with positions=True"):
            model.features(tokens[:, :1], None, cache=caches[1].padded(20, dtype="float32"), slot=T)
        with pytest.raises(ValueError, match="for a cache of rows without positions"):
            model.features(tokens[:, :1], positions[:, :1], cache=caches[0].padded(20, dtype="float32"), slot=T)
    with pytest.raises(ValueError, match="torch_compile='whole'"):
        torch_transformer.build(LLAMA, PARAMS, torch_compile="whole")


def test_scanned_layers_equal_unrolled_ones_with_dropout_on():
    stream = functional.DropoutStream(jnp.array([5, 0], jnp.uint32), jnp.int32(3))
    outs = []
    for scan_layers in (False, True):
        graph, state = nnx.split(transformer.build(LLAMA, PARAMS, scan_layers=scan_layers))
        run = jax.jit(
            lambda state, tokens, g=graph: nnx.merge(g, state)(tokens, jnp.asarray(POSITIONS), dropout=stream)
        )
        outs.append(np.asarray(run(state, random_tokens(0))))
    np.testing.assert_allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
def test_flax_and_equinox_compile_to_programs_of_equal_flops_and_bytes(config, scan_layers):
    params = initial.initial_params(config, 0)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    graph, state = nnx.split(transformer.build(config, params, scan_layers=scan_layers))
    arrays, static = eqx.partition(eqx_transformer.build(config, params, scan_layers=scan_layers), eqx.is_array)
    programs = [
        jax.jit(lambda s, t: nnx.merge(graph, s)(t, t)).lower(state, tokens).compile(),
        jax.jit(lambda a, t: eqx.combine(a, static)(t, t)).lower(arrays, tokens).compile(),
    ]
    costs = [
        (p.cost_analysis()["flops"], p.memory_analysis().temp_size_in_bytes, p.memory_analysis().argument_size_in_bytes)
        for p in programs
    ]
    assert costs[0] == costs[1]


def test_bfloat16_logits_stay_near_float32_ones_and_their_gradients_are_finite():
    tokens = jnp.asarray(random_tokens(1))
    outs, grads = {}, {}
    for dtype in ("float32", "bfloat16"):
        graph, state = nnx.split(transformer.build(LLAMA, PARAMS, dtype=dtype))

        def loss(state, g=graph):
            logits = nnx.merge(g, state)(tokens, jnp.asarray(POSITIONS))
            return jnp.mean(jnp.square(logits.astype(jnp.float32))), logits

        (_, outs[dtype]), grads[dtype] = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    assert outs["bfloat16"].dtype == jnp.bfloat16
    reference = np.asarray(outs["float32"])
    error = np.linalg.norm(np.asarray(outs["bfloat16"], np.float32) - reference) / np.linalg.norm(reference)
    assert 1e-4 < error < 0.03
    for wide, narrow in zip(jax.tree.leaves(grads["float32"]), jax.tree.leaves(grads["bfloat16"])):
        narrow = np.asarray(narrow, np.float32)
        assert np.linalg.norm(narrow - wide) < 0.1 * np.linalg.norm(wide)


MODULES = [(transformer, nn), (eqx_transformer, eqx_nn), (torch_transformer, torch_nn)]


@pytest.mark.parametrize(("module", "layers"), MODULES, ids=["flax", "equinox", "torch"])
def test_layers_with_windows_of_their_own_cannot_be_scanned(module, layers):
    params = initial.initial_params(GEMMA3, 0)
    with pytest.raises(ValueError, match="scan_layers=True needs layers that are alike, got global_every=2"):
        module.build(GEMMA3, params, scan_layers=True)


@pytest.mark.parametrize(("module", "layers"), MODULES, ids=["flax", "equinox", "torch"])
def test_parameters_come_back_as_they_were_put_in(module, layers):
    for config in (LLAMA, QWEN3, GPT2):
        params = {name: x.astype(np.float32) for name, x in initial.initial_params(config, 1, distinct=True).items()}
        back = layers.get_params(module.build(config, params))
        assert back.keys() == params.keys()
        for name, array in params.items():
            np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("module", [m for m, _ in MODULES], ids=["flax", "equinox", "torch"])
def test_missing_unused_and_misshapen_parameters_are_all_named(module):
    params = dict(PARAMS)
    params["layers.0.mlp.extra.kernel"] = params.pop("final_norm.scale")
    params["embed.embedding"] = params["embed.embedding"][:, :-1]
    with pytest.raises(ValueError) as error:
        module.build(LLAMA, params)
    for part in ("missing ['final_norm.scale']", "unused ['layers.0.mlp.extra.kernel']", "embed.embedding is (61, 31)"):
        assert part in str(error.value)


def test_training_on_the_torch_model_does_not_write_into_the_callers_arrays():
    params = {name: x.astype(np.float32) for name, x in PARAMS.items()}
    before = params["embed.embedding"].copy()
    with torch.no_grad():
        torch_transformer.build(LLAMA, params).embed.embedding.add_(1.0)
    np.testing.assert_array_equal(params["embed.embedding"], before)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    from jaxbench import rotary

    scaling = RotaryScaling(kind="llama3", factor=8.0, original_max_seq_len=8192)
    plain, scaled = (np.array(rotary.frequencies(128, 500000.0, s)) for s in (None, scaling))
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_initial_values_depend_on_name_and_seed_only():
    wider = initial.initial_params(LLAMA.model_copy(update={"num_layers": 3}), 0)
    narrower = initial.initial_params(LLAMA, 0)
    np.testing.assert_array_equal(wider["layers.1.mlp.up_proj.kernel"], narrower["layers.1.mlp.up_proj.kernel"])
    assert np.abs(initial.initial_params(LLAMA, 1)["embed.embedding"] - narrower["embed.embedding"]).max() > 0.01
    assert abs(narrower["embed.embedding"].std() - 0.02) < 0.002
