"""Attention against a loop written from the definition, on every backend and implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import attention, fused_attention, prompts
from torch_ref import attention as torch_attention

B, T, N, K, H, BLOCK = 2, 12, 4, 2, 8, 4


def inputs(seed: int, length: int, cut: int) -> dict[str, np.ndarray]:
    """Return random tensors; row 0 has two segments cut at `cut`, row 1 is padded from `length` on."""
    random = np.random.default_rng(seed)
    positions = np.tile(np.arange(T), (B, 1))
    positions[0, cut:] -= cut
    positions[1, length:] = -1
    segments = np.zeros((B, T), np.int64)
    segments[0, cut:] = 1
    shapes = {"query": (B, T, N, H), "key": (B, K, H, T), "value": (B, K, T, H)}
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return tensors | {"positions": positions, "segments": segments}


def definition(query, key, value, positions, segments, window, softcap=None):
    """Attend one query at a time, in float64, straight from the definition."""
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        allowed = [
            s
            for s in range(T)
            if 0 <= positions[b, s] <= positions[b, t]
            and segments[b, s] == segments[b, t]
            and (window is None or positions[b, t] - positions[b, s] < window)
        ]
        if allowed:
            kv = n // (N // K)
            scores = query[b, t, n].astype(float) @ key[b, kv][:, allowed].astype(float) / np.sqrt(H)
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ value[b, kv, allowed].astype(float)
    return out


def call(module, implementation, window, query, key, value, positions, segments, softcap=None):
    return module.attention(
        query,
        key,
        value,
        module.Spans(positions, positions, segments, segments),
        sliding_window=window,
        implementation=implementation,
        block_size=BLOCK,
        softcap=softcap,
    )


JITTED = {
    (implementation, window): jax.jit(lambda *args, i=implementation, w=window: call(attention, i, w, *args))
    for implementation in ("dense", "blocked")
    for window in (None, 3)
}


@given(st.integers(0, 1000), st.integers(1, T), st.integers(0, T), st.sampled_from([None, 3]))
def test_every_implementation_equals_the_definition(seed, length, cut, window):
    arrays = inputs(seed, length, cut)
    expected = definition(**arrays, window=window)
    for (_, jitted_window), function in JITTED.items():
        if jitted_window == window:
            np.testing.assert_allclose(np.asarray(function(*arrays.values())), expected, atol=2e-6)
    for implementation in ("dense", "blocked", "fused"):
        tensors = [torch.from_numpy(x) for x in arrays.values()]
        actual = call(torch_attention, implementation, window, *tensors)
        np.testing.assert_allclose(actual.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("module", [attention, torch_attention], ids=["jax", "torch"])
def test_scores_are_capped_as_the_definition_says_or_the_kernel_is_refused(module):
    arrays = inputs(0, 9, 5)
    convert = torch.from_numpy if module is torch_attention else jnp.asarray
    given_ = [convert(x) for x in arrays.values()]
    expected = definition(**arrays, window=3, softcap=0.7)
    for implementation in ("dense", "blocked"):
        found = np.asarray(call(module, implementation, 3, *given_, softcap=0.7))
        np.testing.assert_allclose(found, expected, atol=2e-6)
    with pytest.raises(ValueError, match=r"softcap=0.7 goes with dense and blocked attention.*implementation='fused'"):
        call(module, "fused", 3, *given_, softcap=0.7)


@pytest.mark.parametrize("module", [attention, torch_attention], ids=["jax", "torch"])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_a_shared_prompt_is_seen_by_every_segment_behind_it(module, implementation):
    arrays = inputs(1, T, 7)
    positions, segments = arrays["positions"], arrays["segments"]
    positions[:], segments[:] = np.r_[0:3, 3:7, 3:8], np.r_[[-1] * 3, [0] * 4, [1] * 5]
    convert = torch.from_numpy if module is torch_attention else jnp.asarray
    found = np.asarray(call(module, implementation, None, *map(convert, arrays.values())))
    for mine in (np.r_[0:3, 3:7], np.r_[0:3, 7:12]):  # one answer behind the prompt, without the other
        axes = {"query": 1, "key": 3, "value": 2, "positions": 1, "segments": 1}
        alone = {name: np.take(x, mine, axis=axes[name]) for name, x in arrays.items()}
        alone["segments"][:] = 0
        expected = np.asarray(call(module, implementation, None, *map(convert, alone.values())))
        np.testing.assert_allclose(found[:, mine[3:]], expected[:, 3:], atol=2e-6)


@pytest.mark.parametrize("module", [attention, torch_attention], ids=["jax", "torch"])
def test_attention_weights_are_what_values_are_weighed_with(module):
    arrays = inputs(2, 9, 5)
    convert = torch.from_numpy if module is torch_attention else jnp.asarray
    given_ = {name: convert(x) for name, x in arrays.items()}
    spans = module.Spans(*[given_["positions"]] * 2, *[given_["segments"]] * 2)
    mask = module.attention_mask(spans, 3)
    weights = np.asarray(module.attention_weights(given_["query"], given_["key"], mask, softcap=0.7))
    values = np.repeat(arrays["value"], N // K, axis=1)  # of each query head
    expected = definition(**arrays, window=3, softcap=0.7)
    np.testing.assert_allclose(np.einsum("BNTS,BNSH->BTNH", weights, values), expected, atol=2e-6)
    total = weights.sum(-1)
    np.testing.assert_allclose(total, np.broadcast_to(np.asarray(mask).any(-1)[:, None], total.shape), atol=2e-6)


def test_the_softmax_of_a_decode_step_is_the_same_on_every_platform(x64):
    random = np.random.default_rng(0)
    scores = random.normal(scale=9.0, size=(2, 1, 2, 1, 6))
    scores[random.random(scores.shape) < 0.3] = -np.inf
    scores[1, 0, 1] = -np.inf  # this row sees no key
    assert np.isneginf(scores).any(-1).sum() > 1
    weights = random.normal(size=scores.shape)
    ways = (attention._softmax, attention._plain_softmax)

    def gradient(way, scores):
        return jax.jit(jax.grad(lambda x: jnp.sum(way(x) * weights.astype(x.dtype))))(scores)

    for dtype, rtol in (("float64", 1e-14), ("float32", 2e-6)):
        given_ = jnp.asarray(scores, dtype)
        wanted, found = (jax.jit(way)(given_) for way in ways)
        assert found.dtype == wanted.dtype == dtype and (found[1, 0, 1] == 0).all()
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=0)
        np.testing.assert_allclose(gradient(ways[1], given_), gradient(ways[0], given_), rtol=0, atol=10 * rtol)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_without_padding_go_to_cudnn_without_a_mask_and_mean_the_same(window, monkeypatch):
    """In XLA's name here: it takes the same arguments, and reads them as cuDNN does."""
    given_, kernel = [], jax.nn.dot_product_attention

    def recorded(query, key, value, **how):
        given_.append(how)
        with jax.numpy_rank_promotion("allow"):
            return kernel(query, key, value, **how | {"implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    arrays = inputs(3, T, T)
    halved = {name: arrays[name].astype(np.float16) for name in ("query", "key", "value")}  # cuDNN takes no float32
    q, k, v, positions = map(jnp.asarray, (*halved.values(), arrays["positions"]))
    arrays |= {name: value.astype(np.float32) for name, value in halved.items()}
    how = {"sliding_window": window, "implementation": "cudnn"}
    plain = attention.attention(q, k, v, attention.Spans(positions, None), **how)
    masked = attention.attention(q, k, v, attention.Spans(positions, positions), **how)
    assert "mask" not in given_[0] and given_[0]["is_causal"] and given_[1]["mask"].shape == (B, 1, T, T)
    for found in (plain, masked):
        np.testing.assert_allclose(found, definition(**arrays, window=window), atol=2e-3)
    with pytest.raises(ValueError, match="takes bfloat16 and float16, got float32: use dense or blocked"):
        attention.attention(*(x.astype(jnp.float32) for x in (q, k, v)), attention.Spans(positions, None), **how)


def test_a_row_that_may_attend_to_nothing_is_zero_with_zero_gradient():
    arrays = {name: jnp.asarray(x) for name, x in inputs(0, 5, T).items()}
    for implementation in ("dense", "blocked"):
        out = np.asarray(JITTED[implementation, None](*arrays.values()))
        assert (out[1, 5:] == 0).all() and np.isfinite(out).all()
        grads = jax.jit(
            jax.grad(
                lambda q, k, v, i=implementation: jnp.sum(
                    call(attention, i, None, q, k, v, arrays["positions"], arrays["segments"]) ** 2
                ),
                argnums=(0, 1, 2),
            )
        )(arrays["query"], arrays["key"], arrays["value"])
        assert all(np.isfinite(g).all() for g in grads)
        assert (np.asarray(grads[0])[1, 5:] == 0).all()


def test_blocked_attentions_gradient_equals_dense_attentions():
    arrays = {name: jnp.asarray(x) for name, x in inputs(1, 9, 4).items()}

    def gradient(implementation):
        def loss(q, k, v):
            return jnp.sum(
                jnp.sin(call(attention, implementation, 3, q, k, v, arrays["positions"], arrays["segments"]))
            )

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(arrays["query"], arrays["key"], arrays["value"])

    for dense, blocked in zip(gradient("dense"), gradient("blocked")):
        np.testing.assert_allclose(np.asarray(dense), np.asarray(blocked), atol=1e-6)


def temp_bytes(implementation: str, length: int, *, with_gradient: bool) -> int:
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2, 16, length), jnp.float32)
    value = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)
    positions = jnp.arange(length)[None]

    def function(q, k, v):
        return attention.attention(
            q, k, v, attention.Spans(positions, positions), implementation=implementation, block_size=64
        )

    if with_gradient:
        compiled = (
            jax.jit(jax.grad(lambda *x: function(*x).sum(), argnums=(0, 1, 2))).lower(shape, key, value).compile()
        )
    else:
        compiled = jax.jit(function).lower(shape, key, value).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("implementation", ["dense", "blocked", "fused"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [T, 5, 1])
def test_torch_needs_no_key_positions_where_nothing_is_padded(implementation, window, num_queries):
    arrays = inputs(3, T, T)
    expected = definition(**arrays | {"segments": np.zeros((B, T), int)}, window=window)[:, -num_queries:]
    query, key, value, positions, _ = (torch.from_numpy(x) for x in arrays.values())
    spans = torch_attention.Spans(positions[:, -num_queries:], None)
    how = {"sliding_window": window, "implementation": implementation, "block_size": BLOCK}
    found = torch_attention.attention(query[:, -num_queries:], key, value, spans, **how)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("length", "has_amx", "has_products", "is_dense"),
    [(192, False, True, True), (160, False, True, False), (192, True, True, False), (192, False, False, False)],
)
def test_torch_attends_to_long_narrow_prompts_by_products_where_a_cpu_has_them_and_no_matrix_unit(
    length, has_amx, has_products, is_dense, monkeypatch
):
    monkeypatch.setattr(torch_attention, "HAS_AMX", has_amx)
    products = frozenset({torch.bfloat16} if has_products else ())
    monkeypatch.setattr(torch_attention.functional, "NARROW_PRODUCTS", products)
    random = torch.Generator().manual_seed(0)
    sizes = ((1, length, 4, 8), (1, 2, 8, length), (1, 2, length, 8))
    arrays = [torch.randn(size, generator=random).to(torch.bfloat16) for size in sizes]
    spans = torch_attention.Spans(torch.arange(length)[None], None)
    how = ({"is_ordered": True, "implementation": name} for name in ("fused", "dense"))
    fused, dense = (torch_attention.attention(*arrays, spans, **each) for each in how)
    assert torch.equal(fused, dense) == is_dense
    torch.testing.assert_close(fused, dense, rtol=0, atol=0.02)


def test_a_torch_key_lies_in_memory_as_a_value_does():
    keys, values = torch.zeros(4, 5, 8).transpose(1, 2), torch.zeros(4, 5, 8)
    cache = torch_attention.KVCache((keys, None), (values, None), None).padded(9, dtype="float64")
    assert cache.keys[0].shape == (4, 8, 9) and cache.keys[0].transpose(1, 2).is_contiguous()
    assert cache.values[0].shape == (4, 9, 8) and cache.values[0].dtype == cache.keys[0].dtype == torch.float64
    assert cache.keys[1] is None and cache.positions is None


@pytest.mark.parametrize("with_gradient", [False, True])
def test_blocked_attention_memory_grows_linearly_with_length(with_gradient):
    short, long = (temp_bytes("blocked", n, with_gradient=with_gradient) for n in (1024, 4096))
    assert long < 4.5 * short
    dense_short, dense_long = (temp_bytes("dense", n, with_gradient=with_gradient) for n in (1024, 4096))
    assert dense_long > 12 * dense_short
    assert long < dense_long / 10


@pytest.mark.parametrize("window", [None, 3])
def test_splash_attention_computes_the_same_function(window):
    arrays = inputs(2, 7, 5)
    positions, segments = jnp.asarray(arrays["positions"]), jnp.asarray(arrays["segments"])
    q, k, v = (jnp.asarray(arrays[name]) for name in ("query", "key", "value"))
    how = {"sliding_window": window, "kernel": "splash", "mask": lambda: pytest.fail("a mask"), "interpret": True}
    with jax.numpy_rank_promotion("allow"):  # the kernel's own code promotes ranks
        actual = fused_attention.attention(q, k, v, positions, segments, **how)
    np.testing.assert_allclose(np.asarray(actual), definition(**arrays, window=window), atol=2e-6)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
@pytest.mark.parametrize("module", [attention, torch_attention])
def test_a_call_without_queries_or_keys_answers_zeros(module, implementation, is_ordered):
    library = torch if module is torch_attention else jnp
    for num_queries, num_keys in ((0, 0), (0, 3), (3, 0)):
        query, key = library.ones((2, num_queries, 4, 6)), library.ones((2, 2, 6, num_keys))
        positions = [library.zeros((2, count), dtype=library.int32) for count in (num_queries, num_keys)]
        how = {"implementation": implementation, "is_ordered": is_ordered, "block_size": 2}
        found = module.attention(query, key, library.ones((2, 2, num_keys, 6)), module.Spans(*positions), **how)
        np.testing.assert_array_equal(np.asarray(found), np.zeros((2, num_queries, 4, 6)))


@pytest.mark.parametrize("module", [attention, torch_attention])
def test_a_cache_is_not_padded_to_fewer_slots_than_it_has(module):
    library = torch if module is torch_attention else jnp
    keys, values = (library.ones((1, 2, 4)),), (library.ones((1, 4, 2)),)
    cache = module.KVCache(keys, values, library.arange(4)[None])
    assert cache.padded(4, dtype="float32").keys[0].shape == (1, 2, 4)
    with pytest.raises(ValueError, match="cache: 4 slots cannot be padded to length=3"):
        cache.padded(3, dtype="float32")


@pytest.mark.parametrize("module", [attention, torch_attention])
def test_wrong_heads_and_unknown_implementations_are_named(module):
    array = jnp.zeros if module is not torch_attention else torch.zeros
    query, positions = array((1, 2, 3, 4)), array((1, 2), dtype=(torch if module is torch_attention else jnp).int32)
    with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        module.attention(query, array((1, 2, 4, 2)), array((1, 2, 2, 4)), module.Spans(positions, positions))
    key, value = array((1, 3, 4, 2)), array((1, 3, 2, 4))
    with pytest.raises(ValueError, match="'flash' is not one of dense, blocked"):
        module.attention(query, key, value, module.Spans(positions, positions), implementation="flash")


def test_a_missing_fused_kernel_is_named():
    query, key, value = jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 3, 4, 2)), jnp.zeros((1, 3, 2, 4))
    positions = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="platform 'cpu': use dense or blocked"):
        attention.attention(query, key, value, attention.Spans(positions, positions), implementation="fused")


@pytest.mark.parametrize("module", [attention, torch_attention], ids=["jax", "torch"])
def test_leaving_out_the_keys_that_come_later_changes_nothing(module, monkeypatch):
    monkeypatch.setattr(prompts, "MIN_PART", 2)
    assert prompts.query_parts(T) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    arrays = inputs(0, 9, 5)
    whole, parts = (_ordered(module, arrays, is_ordered=is_ordered) for is_ordered in (False, True))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    # Values that come later are never read: poison in the last one reaches the last part only.
    arrays["value"][:, :, -1] = np.nan
    assert np.isfinite(_ordered(module, arrays, is_ordered=True)[:, :9]).all()


def _ordered(module, arrays, *, is_ordered):
    convert = torch.as_tensor if module is torch_attention else jnp.asarray
    given = {name: convert(array) for name, array in arrays.items()}
    positions, segments = given["positions"], given["segments"]
    spans = module.Spans(positions, positions, segments, segments)
    return np.asarray(module.attention(given["query"], given["key"], given["value"], spans, is_ordered=is_ordered))
