"""Analytic FLOPs and memory traffic of the decoder (S file: neither JAX nor PyTorch).

One multiply-add is two FLOPs. Only matrix products are counted: norms, rotary embedding, softmax, activations and the
optimiser are elementwise and left out (checked against the compiler's count in tests/measure/test_flops.py).
Attention is counted as the dense reference computes it: queries of a whole sequence against the keys up to the end of
their part (prompts.query_parts), masked or not; a decoded token against every cache slot.
Prefill needs the head at the last position only. Bytes count only weights, key-value cache and logits: a lower bound
on memory traffic, so that the accounting never pushes a share of the roofline above one.

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
    bytes: int  # least bytes moved to and from memory
    parts: dict[str, int]  # FLOP by part: projections, scores, mlp, head


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"flops: unknown dtype={dtype!r}, known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def parameter_bytes(config: TransformerConfig, dtype: str) -> int:
    """Bytes of all parameters in one dtype."""
    return num_parameters(config) * dtype_bytes(dtype)


def kv_cache_bytes(config: TransformerConfig, *, batch: int, length: int, dtype: str) -> int:
    """Bytes of keys and values of `length` slots (positions, 4 bytes per slot, are left out)."""
    slots = batch * length * config.num_layers
    return 2 * slots * config.num_kv_heads * config.head_dim * dtype_bytes(dtype)


def prefill_cost(
    config: TransformerConfig,
    *,
    batch: int,
    prompt_tokens: int,
    dtype: str,
    cache_length: int | None = None,
    weight_bytes: int | None = None,
) -> Cost:
    """Cost of filling the cache from a prompt; the head runs at the last position only.

    Args:
      batch: rows; those of one chip where weights are sharded.
      cache_length: key slots that every query reads (unset: its part of the prompt).
      weight_bytes: bytes of the weights that are read (unset: all).
    """
    pairs = _ordered_pairs(prompt_tokens) if cache_length is None else prompt_tokens * cache_length
    parts = _forward_flops(config, batch=batch, tokens=prompt_tokens, pairs=pairs, head_tokens=1)
    moved = _weight_bytes(config, batch * prompt_tokens, dtype) if weight_bytes is None else weight_bytes
    moved += kv_cache_bytes(config, batch=batch, length=prompt_tokens, dtype=dtype)
    moved += batch * config.vocab_size * dtype_bytes(dtype)
    return Cost(sum(parts.values()), moved, parts)


def decode_cost(
    config: TransformerConfig, *, batch: int, cache_length: int, dtype: str, weight_bytes: int | None = None
) -> Cost:
    """Cost of one decode step that attends to `cache_length` key slots and writes one; weight_bytes as in prefill."""
    parts = _forward_flops(config, batch=batch, tokens=1, pairs=cache_length, head_tokens=1)
    moved = _weight_bytes(config, batch, dtype) if weight_bytes is None else weight_bytes
    moved += kv_cache_bytes(config, batch=batch, length=cache_length + 1, dtype=dtype)
    moved += batch * config.vocab_size * dtype_bytes(dtype)
    return Cost(sum(parts.values()), moved, parts)


def train_cost(
    config: TransformerConfig,
    *,
    batch: int,
    seq_len: int,
    dtype: str,
    stored_parameters: int | None = None,
    used_parameters: int | None = None,
    vocab_chips: int = 1,
) -> Cost:
    """Cost of forward, backward and an AdamW update: the matrix products of three forward passes, no rematerialisation.

    The weights used are read in forward and backward. The weights stored are rewritten, their gradient is written and
    read, and both float32 moments are read and written. The logits are written and read once each way.

    Args:
      batch: rows; those of one chip where weights are sharded.
      stored_parameters: parameters that the chip stores and updates (unset: all).
      used_parameters: parameters that it computes with (unset: all).
      vocab_chips: chips that share the logits.
    """
    pairs = _ordered_pairs(seq_len) if config.is_causal else seq_len**2
    forward = _forward_flops(config, batch=batch, tokens=seq_len, pairs=pairs, head_tokens=seq_len)
    parts = {name: 3 * flops for name, flops in forward.items()}
    count, size = num_parameters(config), dtype_bytes(dtype)
    stored, used = (count if given is None else given for given in (stored_parameters, used_parameters))
    moved = used * 2 * size + stored * (3 * size + 4 * dtype_bytes("float32"))
    moved += 4 * batch * seq_len * config.vocab_size // vocab_chips * size
    return Cost(sum(parts.values()), moved, parts)


def _ordered_pairs(length: int) -> int:
    """Count the query-key pairs of one row whose queries are attended part by part."""
    return sum((end - start) * end for start, end in prompts.query_parts(length))


def _forward_flops(
    config: TransformerConfig, *, batch: int, tokens: int, pairs: int, head_tokens: int
) -> dict[str, int]:
    """Count the matrix products of one forward pass; `pairs` are the query-key pairs of a row."""
    rows = batch * tokens
    query = config.num_heads * config.head_dim
    projections = 2 * config.d_model * (query + config.num_kv_heads * config.head_dim)
    num_matrices = 3 if config.is_gated else 2
    return {
        "projections": 2 * rows * projections * config.num_layers,
        "scores": 4 * batch * pairs * query * config.num_layers,
        "mlp": 2 * rows * num_matrices * config.d_model * config.d_ff * config.num_layers,
        "head": 2 * batch * head_tokens * config.d_model * config.vocab_size,
    }


def _weight_bytes(config: TransformerConfig, lookups: int, dtype: str) -> int:
    """Bytes of weights that one forward pass reads: all once, but only the rows used of an untied or position table."""
    size, count = dtype_bytes(dtype), num_parameters(config)
    rows = 0
    if not config.tie_embeddings:
        count -= config.vocab_size * config.d_model
        rows += min(lookups, config.vocab_size)
    if config.position == "learned":
        count -= config.max_seq_len * config.d_model
        rows += min(lookups, config.max_seq_len)
    return (count + rows * config.d_model) * size
