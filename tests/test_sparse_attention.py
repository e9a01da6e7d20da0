"""Block-sparse attention: exact against a dense mask in float64, work in proportion to the visible blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbench import attention
from jaxbench.block_pattern import BlockPattern
from jaxbench.parity import sparse_attention as reference
from jaxbench.sparse_attention import block_sparse_attention
from torch_ref import attention as torch_attention
from torch_ref import sparse_attention as torch_sparse_attention

PATTERNS = [
    BlockPattern(block_size=4, local=1),
    BlockPattern(block_size=4, local=2, first=1),
    BlockPattern(block_size=4, local=1, first=1, stride=3),
    BlockPattern(block_size=64, local=1),  # one block that the row does not fill
]
LENGTH = 22  # the last block of 4 is half full
ids = lambda pattern: f"{pattern.block_size}-{pattern.local}-{pattern.first}-{pattern.stride}"


@functools.cache
def compiled(pattern: BlockPattern):
    return jax.jit(functools.partial(block_sparse_attention, pattern=pattern))


@functools.cache
def compiled_gradients(pattern: BlockPattern):
    def loss(query, key, value, spans, weight):
        return jnp.sum(block_sparse_attention(query, key, value, spans, pattern=pattern) * weight)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def in_jax(pattern, case):
    return np.asarray(compiled(pattern)(case.query, case.key, case.value, attention.Spans(*case.spans)))


def in_torch(pattern, case):
    spans = torch_attention.Spans(*(None if x is None else torch.tensor(x) for x in case.spans))
    tensors = map(torch.tensor, (case.query, case.key, case.value))
    return torch_sparse_attention.block_sparse_attention(*tensors, spans, pattern=pattern).numpy()


BACKENDS = pytest.mark.parametrize("run", [in_jax, in_torch])


# The pattern


def test_each_rule_of_the_pattern_shows_its_blocks():
    assert BlockPattern(local=2).visible(4).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]  # fmt: skip  # noqa: E501
    assert BlockPattern(local=1, first=1).visible(4).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]  # fmt: skip  # noqa: E501
    assert BlockPattern(local=1, stride=2).visible(4).astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]  # fmt: skip  # noqa: E501


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6), st.integers(0, 4), st.none() | st.integers(1, 5))
def test_pairs_and_mask_are_the_visible_blocks_and_every_block_sees_itself(length, size, local, first, stride):
    pattern = BlockPattern(block_size=size, local=local, first=first, stride=stride)
    count = pattern.num_blocks(length)
    rows, columns = pattern.pairs(count)
    assert (np.diff(rows) >= 0).all() and set(rows) == set(range(count)) and (columns <= rows).all()
    mask, seen = pattern.mask(length), set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert mask.shape == (length, length)
    for query, key in np.ndindex(length, length):
        assert mask[query, key] == ((query // size, key // size) in seen)
    assert 0 < pattern.density(length) <= 1


@pytest.mark.parametrize("field", [{"block_size": 0}, {"local": 0}, {"first": -1}, {"stride": 0}, {"random": 3}])
def test_a_pattern_that_is_none_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        BlockPattern(**field)


# The sum


@BACKENDS
@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_outputs_equal_a_dense_mask_in_float64(x64, run, pattern):
    for seed in range(3):
        case = reference.inputs(seed, length=LENGTH)
        found = run(pattern, case)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, reference.dense(pattern, case), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS[1:3], ids=ids)
def test_gradients_equal_those_of_a_dense_mask_in_float64(x64, pattern):
    case = reference.inputs(0, length=LENGTH)
    found = compiled_gradients(pattern)(case.query, case.key, case.value, attention.Spans(*case.spans), case.weight)
    for mine, wanted in zip(found, reference.dense_gradients(pattern, case), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-12)


@BACKENDS
def test_a_pattern_that_sees_everything_is_plain_attention(x64, run):
    case = reference.inputs(5, length=LENGTH)
    spans = attention.Spans(*map(jnp.asarray, case.spans))
    plain = attention.attention(*map(jnp.asarray, (case.query, case.key, case.value)), spans)
    found = run(BlockPattern(block_size=4, local=6), case)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12)


@BACKENDS
def test_spans_without_key_positions_are_rows_without_padding_and_no_tokens_give_none(x64, run):
    case, pattern = reference.inputs(0, length=LENGTH), PATTERNS[1]
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(case.query), 1))
    plain, given = (case._replace(spans=(positions, keys, None, None)) for keys in (None, positions))
    np.testing.assert_array_equal(run(pattern, plain), run(pattern, given))
    no_spans = (positions[:, :0], positions[:, :0], None, None)
    empty = case._replace(query=case.query[:, :0], key=case.key[..., :0], value=case.value[:, :, :0], spans=no_spans)
    assert run(pattern, empty).shape == (len(case.query), 0, *case.query.shape[2:])


@BACKENDS
def test_padding_gets_zeros_and_reaches_nobody(x64, run):
    case, pattern = reference.inputs(1, length=LENGTH), PATTERNS[1]
    is_padding = case.spans[0] < 0
    assert is_padding.any()
    found = run(pattern, case)
    assert (found[is_padding] == 0).all()
    loud = case._replace(value=np.where(is_padding[:, None, :, None], 1e6, case.value))
    np.testing.assert_array_equal(run(pattern, loud)[~is_padding], found[~is_padding])


@settings(max_examples=15)
@given(st.integers(0, LENGTH - 1), st.integers(0, 1000))
def test_no_output_depends_on_tokens_after_it(cut, seed):
    with jax.enable_x64(True):
        case, pattern = reference.inputs(seed, length=LENGTH), PATTERNS[2]
        other = reference.inputs(seed + 1, length=LENGTH)
        key = np.concatenate([case.key[..., :cut], other.key[..., cut:]], axis=3)
        value = np.concatenate([case.value[:, :, :cut], other.value[:, :, cut:]], axis=2)
        changed = case._replace(key=key, value=value)
        for run in (in_jax, in_torch):
            np.testing.assert_array_equal(run(pattern, changed)[:, :cut], run(pattern, case)[:, :cut])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_keep_their_type_and_stay_near_float64(dtype):
    with jax.enable_x64(True):
        case, pattern = reference.inputs(2, length=LENGTH), PATTERNS[1]
        wanted = reference.dense(pattern, case)
    arrays = [jnp.asarray(x, dtype) for x in (case.query, case.key, case.value)]
    found = compiled(pattern)(*arrays, attention.Spans(*map(jnp.asarray, case.spans)))
    assert found.dtype == dtype
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
    assert 0 < error < {"bfloat16": 1e-2, "float32": 1e-6}[dtype]


def test_shapes_that_are_no_whole_rows_are_refused():
    case, pattern = reference.inputs(0, length=LENGTH), PATTERNS[0]
    for library, array, spans_of in (
        (block_sparse_attention, jnp.asarray, attention.Spans),
        (torch_sparse_attention.block_sparse_attention, torch.tensor, torch_attention.Spans),
    ):
        query, key, value = map(array, (case.query, case.key, case.value))
        spans = spans_of(*map(array, case.spans))
        with pytest.raises(ValueError, match="21 queries with 22 keys, wanted whole rows"):
            library(query[:, 1:], key, value, spans, pattern=pattern)
        with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
            library(query[:, :, :3], key, value, spans, pattern=pattern)


# The work


def flops(call, length: int) -> float:
    shape = jax.ShapeDtypeStruct
    arrays = [shape((1, length, 4, 16), "float32"), shape((1, 2, 16, length), "float32")]
    arrays.append(shape((1, 2, length, 16), "float32"))
    positions = shape((1, length), "int32")
    compiled = jax.jit(call).lower(*arrays, attention.Spans(positions, positions)).compile()
    return compiled.cost_analysis()["flops"]


def test_compiled_flops_fall_in_proportion_to_the_visible_blocks():
    length, size = 512, 16
    all_blocks = BlockPattern(block_size=size, local=length // size)
    patterns = [BlockPattern(block_size=size, local=4), BlockPattern(block_size=size, local=2, first=1, stride=4)]
    whole = flops(functools.partial(block_sparse_attention, pattern=all_blocks), length)
    for pattern in patterns:
        share = flops(functools.partial(block_sparse_attention, pattern=pattern), length) / whole
        assert share == pytest.approx(pattern.density(length), rel=0.1) and share < 0.4


def test_compiled_flops_of_a_local_pattern_grow_with_the_length_and_not_its_square():
    pattern = BlockPattern(block_size=16, local=4)
    counts = [flops(functools.partial(block_sparse_attention, pattern=pattern), length) for length in (256, 512, 1024)]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.1) and counts[2] / counts[1] == pytest.approx(2, rel=0.06)
    dense = [flops(attention.attention, length) for length in (512, 1024)]
    assert dense[1] / dense[0] == pytest.approx(4, rel=0.1) and counts[2] < dense[1] / 4
