"""Ring attention over simulated devices against dense attention on one, in float64, with gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxbench import attention, sharding
from jaxbench.parallel import ring_attention

B, T, N, K, H = 2, 24, 4, 2, 4
POINTS = ("query", "key", "value")


def inputs(kind: str):
    """Return queries, keys and values, and the integers of one kind of row."""
    random = np.random.default_rng(0)
    tensors = [random.normal(size=shape) for shape in ((B, T, N, H), (B, K, H, T), (B, K, T, H))]
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    segments = None
    if kind == "padded":
        positions[1, T // 3 :] = -1
    if kind == "segments":
        segments = np.ones((B, T), np.int32)
        segments[0, 5:], segments[1, 17:] = 2, 2
        positions[0, 5:], positions[1, 17:] = np.arange(T - 5), np.arange(T - 17)
    return tensors, positions, segments


def over_ring(
    size: int, sliding_window: int | None, query, key, value, positions, segments, *, block_size: int = 2, softcap=None
):
    """Return ring attention of whole arrays, computed by `size` devices in blocks of keys."""
    mesh = sharding.make_mesh({"sequence": size}, jax.devices()[:size])
    tokens = P(None, "sequence")

    def local(query, key, value, positions, segments):
        return ring_attention.ring_attention(
            query,
            key,
            value,
            attention.Spans(positions, positions, segments, segments),
            sliding_window=sliding_window,
            axis="sequence",
            block_size=block_size,
            softcap=softcap,
        )

    specs = (tokens, P(None, None, None, "sequence"), P(None, None, "sequence"), tokens, tokens)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return run(query, key, value, positions, segments)


def dense(sliding_window: int | None, query, key, value, positions, segments, *, softcap=None):
    """Return attention on one device."""
    spans = attention.Spans(positions, positions, segments, segments)
    return attention.attention(query, key, value, spans, sliding_window=sliding_window, softcap=softcap)


@pytest.mark.parametrize(
    ("kind", "size", "sliding_window", "softcap"),
    [
        ("causal", 4, None, None), ("segments", 8, None, None), ("padded", 2, None, None), ("causal", 3, 5, None),
        ("padded", 2, 5, 0.7),
    ],
)  # fmt: skip
def test_the_ring_equals_dense_attention_and_its_gradients(x64, kind, size, sliding_window, softcap):
    tensors, positions, segments = inputs(kind)
    seed = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, N, H)))

    def loss(attend, tensors):
        mixed = attend(*tensors, positions, segments)
        return jnp.sum(mixed * seed), mixed

    outcomes = []
    for attend in (functools.partial(over_ring, size, sliding_window), functools.partial(dense, sliding_window)):
        attend = functools.partial(attend, softcap=softcap)
        grad = jax.jit(jax.grad(functools.partial(loss, attend), has_aux=True))
        outcomes.append(grad([jnp.asarray(x) for x in tensors]))
    (ring_grads, ring_mixed), (grads, mixed) = outcomes
    np.testing.assert_allclose(ring_mixed, mixed, rtol=0, atol=1e-13)
    assert float(jnp.linalg.norm(mixed)) > 1
    for name, one, other in zip(POINTS, ring_grads, grads):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12, err_msg=name)
        assert float(jnp.linalg.norm(other)) > 1, name


def test_bfloat16_rows_accumulate_in_float32():
    tensors, positions, segments = inputs("causal")
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in tensors]
    found = jax.jit(functools.partial(over_ring, 4, None))(*narrow, positions, segments)
    wide = jax.jit(functools.partial(dense, None))(*[x.astype(jnp.float32) for x in narrow], positions, segments)
    assert found.dtype == jnp.bfloat16
    # One rounding of the weights and one of the result, each 2**-9 relative.
    assert float(jnp.max(jnp.abs(found.astype(jnp.float32) - wide))) <= 2**-7


@pytest.mark.parametrize("block_size", [5, 128])
def test_blocks_that_do_not_divide_the_keys_change_nothing(x64, block_size):
    tensors, positions, segments = inputs("segments")
    tensors = [jnp.asarray(x) for x in tensors]

    def loss(attend, tensors):
        mixed = attend(*tensors, positions, segments)
        return jnp.sum(mixed**3), mixed

    outcomes = []
    for attend in (functools.partial(over_ring, 2, None, block_size=block_size), functools.partial(dense, None)):
        outcomes.append(jax.jit(jax.grad(functools.partial(loss, attend), has_aux=True))(tensors))
    for one, other in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(outcomes[1])):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_memory_of_one_device_is_linear_in_its_tokens():
    """Twice the tokens need twice the temporaries; with all of a part's scores at once it was four times."""
    size, heads, temporaries = 2, 4, {}
    for length in (1024, 2048, 4096):
        shapes = ((1, length, heads, 16), (1, heads, 16, length), (1, heads, length, 16))
        tensors = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(query, key, value, positions):
            return jnp.sum(over_ring(size, None, query, key, value, positions, None, block_size=128))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*tensors, ids).compile()
        temporaries[length] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[2048] < 2.2 * temporaries[1024] and temporaries[4096] < 2.2 * temporaries[2048], temporaries
    scores = 4 * heads * (4096 // size) ** 2  # bytes of a part's, which were held before
    assert temporaries[4096] < scores
