"""Analytic FLOPs and memory traffic of the decoder (S file: neither JAX nor PyTorch).

One multiply-add is two FLOPs. Only matrix products are counted: norms, rotary embedding, softmax, activations and the
optimiser are elementwise and left out (measured against the compiler's count in tests/bench/test_flops.py).
Attention is counted as the dense reference computes it: queries of a whole sequence against the keys up to the end of
their part (prompts.query_parts), masked or not; a decoded token against every cache slot.
Prefill needs the head at the last position only. Bytes are the least that memory must move when nothing but weights,
key-value cache and logits crosses it: a lower bound, so that a share of the roofline is never above one by accounting.

Axis letters: B batch, T query positions, S key slots, D model width, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxbench import prompts
from jaxbench.config import TransformerConfig
from jaxbench.initial import num_parameters

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Cost(NamedTuple):
    """FLOPs and bytes of one program run."""

    flops: int  # FLOP, matrix products only
    bytes: int  # bytes moved to and from memory at least
    parts: dict[str, int]  # FLOP by part: projections, scores, mlp, head


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"flops: unknown dtype={dtype!r}, known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def parameter_count(config: TransformerConfig) -> int:
    """Return the number of parameters, a tied embedding counted once."""
    return num_parameters(config)


def parameter_bytes(config: TransformerConfig, dtype: str) -> int:
    """Return the bytes of all parameters in one dtype."""
    return parameter_count(config) * dtype_bytes(dtype)


def kv_cache_bytes(config: TransformerConfig, *, batch: int, length: int, dtype: str) -> int:
    """Return the bytes of keys and values of `length` slots (positions, 4 bytes a slot, left out)."""
    slots = batch * length * config.num_layers
    return 2 * slots * config.num_kv_heads * config.head_dim * dtype_bytes(dtype)


def prefill_cost(
    config: TransformerConfig, *, batch: int, prompt_tokens: int, dtype: str, cache_length: int | None = None
) -> Cost:
    """Return the cost of filling the cache from a prompt; the head runs at the last position only.

    `cache_length` is the number of key slots every query reads (its part of the prompt when None).
    """
    pairs = _ordered_pairs(prompt_tokens) if cache_length is None else prompt_tokens * cache_length
    parts = _forward_flops(config, batch=batch, tokens=prompt_tokens, pairs=pairs, head_tokens=1)
    moved = _weight_bytes(config, batch * prompt_tokens, dtype)
    moved += kv_cache_bytes(config, batch=batch, length=prompt_tokens, dtype=dtype)
    moved += batch * config.vocab_size * dtype_bytes(dtype)
    return Cost(sum(parts.values()), moved, parts)


def decode_cost(config: TransformerConfig, *, batch: int, cache_length: int, dtype: str) -> Cost:
    """Return the cost of one decode step that attends to `cache_length` key slots and writes one."""
    parts = _forward_flops(config, batch=batch, tokens=1, pairs=cache_length, head_tokens=1)
    moved = _weight_bytes(config, batch, dtype)
    moved += kv_cache_bytes(config, batch=batch, length=cache_length + 1, dtype=dtype)
    moved += batch * config.vocab_size * dtype_bytes(dtype)
    return Cost(sum(parts.values()), moved, parts)


def prefill_traffic(config: TransformerConfig, *, batch: int, prompt_tokens: int, dtype: str, weight_bytes: int) -> int:
    """Return the least memory traffic of a chip that holds `weight_bytes` of the weights and `batch` of the rows."""
    cost = prefill_cost(config, batch=batch, prompt_tokens=prompt_tokens, dtype=dtype)
    return cost.bytes - _weight_bytes(config, batch * prompt_tokens, dtype) + weight_bytes


def decode_traffic(config: TransformerConfig, *, batch: int, cache_length: int, dtype: str, weight_bytes: int) -> int:
    """Return the least memory traffic of a chip that holds `weight_bytes` of the weights and `batch` of the rows."""
    cost = decode_cost(config, batch=batch, cache_length=cache_length, dtype=dtype)
    return cost.bytes - _weight_bytes(config, batch, dtype) + weight_bytes


def train_traffic(
    config: TransformerConfig,
    *,
    batch: int,
    seq_len: int,
    dtype: str,
    stored_parameters: int,
    used_parameters: int,
    vocab_chips: int = 1,
) -> int:
    """Return the least memory traffic of a chip that stores and updates some parameters and computes with others.

    Used weights are read in forward and backward; stored ones are rewritten, their gradient written and read, both
    float32 moments read and written; the logits of the chip's `batch` rows, its share of `vocab_chips`, are written
    and read once each way.
    """
    size = dtype_bytes(dtype)
    moved = used_parameters * 2 * size + stored_parameters * (3 * size + 4 * dtype_bytes("float32"))
    return moved + 4 * batch * seq_len * config.vocab_size // vocab_chips * size


def train_cost(config: TransformerConfig, *, batch: int, seq_len: int, dtype: str) -> Cost:
    """Return the cost of forward, backward and an AdamW update: three forward passes' matrix products.

    No recomputation of activations; bytes as in `train_traffic` on one chip.
    """
    forward = _forward_flops(config, batch=batch, tokens=seq_len, pairs=_ordered_pairs(seq_len), head_tokens=seq_len)
    parts = {name: 3 * flops for name, flops in forward.items()}
    count = parameter_count(config)
    moved = train_traffic(
        config, batch=batch, seq_len=seq_len, dtype=dtype, stored_parameters=count, used_parameters=count
    )
    return Cost(sum(parts.values()), moved, parts)


def _ordered_pairs(length: int) -> int:
    """Return the query-key pairs of one row whose queries are attended part by part."""
    return sum((end - start) * end for start, end in prompts.query_parts(length))


def _forward_flops(
    config: TransformerConfig, *, batch: int, tokens: int, pairs: int, head_tokens: int
) -> dict[str, int]:
    """Count the matrix products of one forward pass; `pairs` are the query-key pairs of a row."""
    rows = batch * tokens
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = config.d_model * (2 * query + 2 * key_value)
    num_matrices = 3 if config.activation == "swiglu" else 2
    return {
        "projections": 2 * rows * projections * config.num_layers,
        "scores": 4 * batch * pairs * query * config.num_layers,
        "mlp": 2 * rows * num_matrices * config.d_model * config.d_ff * config.num_layers,
        "head": 2 * batch * head_tokens * config.d_model * config.vocab_size,
    }


def _weight_bytes(config: TransformerConfig, lookups: int, dtype: str) -> int:
    """Return the bytes of weights one forward pass reads: all once; an untied or position table only its rows."""
    size, count = dtype_bytes(dtype), parameter_count(config)
    rows = 0
    if not config.tie_embeddings:
        count -= config.vocab_size * config.d_model
        rows += min(lookups, config.vocab_size)
    if config.position == "learned":
        count -= config.max_seq_len * config.d_model
        rows += min(lookups, config.max_seq_len)
    return (count + rows * config.d_model) * size
