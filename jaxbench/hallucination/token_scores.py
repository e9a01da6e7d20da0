"""Score response tokens from a reader's attention, feed-forward layers and logits.

Twin: torch_ref/hallucination/token_scores.py; the same formulas, written literally and slow: reference.py. Axis
letters: reader.py. Everything is in at least float32.

Sources: Sun et al. 2025, arXiv:2410.11414 (external context score, equations 2 and 3; parametric knowledge score,
equation 5); Chuang et al. 2024, arXiv:2407.07071 (lookback ratio).
Differs from Chuang et al.'s released code: there the context of the lookback ratio is the whole prompt before the
answer's heading, with instruction, question and first token, and the heading counts as new.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbench import functional
from jaxbench.attention import Spans, attention_mask, attention_weights
from jaxbench.hallucination.reader import Prompt, Responses, Trace
from jaxbench.native import calls, library

QUERY_TILE = 128  # slots whose attention rows are held at once
LENS_TILE = 64  # slots whose logits over the vocabulary are held at once


class AttentionScores(NamedTuple):
    """Scores of every head at every slot."""

    external: Float[Array, "L N B T"]  # external context score, -1 to 1; 0 where no context token is attended to
    context_mass: Float[Array, "L N B T"]  # attention weight of all context tokens, 0 to 1
    lookback: Float[Array, "L N B T"]  # c / (c + g); c, g: mean weight of context and of generated tokens


def attention_scores(
    model: Any, prompt: Prompt, responses: Responses, trace: Trace, num_attended: Int[Array, " B"]
) -> AttentionScores:
    """Score every head, from recomputed attention rows of the responses' tokens.

    num_attended: how many context tokens with the most attention have their mean hidden state compared with the slot's
    own; at least 1, and all that tie with the last of them are included.
    """
    batch, length = responses.tokens.shape
    tile = min(QUERY_TILE, length)
    tiles = -(-length // tile)
    padded = ((0, 0), (0, tiles * tile - length))
    queries = [
        layer.attention.queries(layer.attention_norm(x), trace.context)
        for layer, x in zip(model.layers, trace.stream[:-1])
    ]
    queries = jnp.pad(jnp.stack(queries), ((0, 0), *padded, (0, 0), (0, 0)))
    keys = jnp.stack(trace.keys).reshape(len(queries), batch, -1, *trace.keys[0].shape[1:])  # [L B K H S]
    spans = trace.context.spans
    positions = jnp.pad(spans.query_positions, padded, constant_values=-1)
    segments = jnp.pad(spans.query_segments, padded)
    wide = jnp.promote_types(trace.hidden.dtype, jnp.float32)
    hidden = jnp.pad(trace.hidden.astype(wide), (*padded, (0, 0)))
    windows = jnp.asarray([layer.attention.sliding_window or 2**30 for layer in model.layers], jnp.int32)

    def scores(index: Array) -> tuple[Array, Array, Array]:
        layer, start = index // tiles, index % tiles * tile
        part = [lax.dynamic_slice_in_dim(x, start, tile, axis=1) for x in (positions, segments, hidden)]
        query = lax.dynamic_slice_in_dim(queries[layer], start, tile, axis=1)
        mask = attention_mask(Spans(part[0], spans.key_positions, part[1], spans.key_segments), None)
        mask &= part[0][:, :, None] - spans.key_positions[:, None, :] < windows[layer]
        weights = attention_weights(query, keys[layer], mask, softcap=model.layers[0].attention.softcap).astype(wide)
        return _of_weights(weights, mask, prompt, responses, part[2], num_attended)

    found = lax.map(scores, jnp.arange(len(queries) * tiles))  # each [L*tiles B N tile]
    return AttentionScores(*(_by_layer(each, tiles)[..., :length] for each in found))


def _of_weights(
    weights: Float[Array, "B N t S"],
    mask: Array,
    prompt: Prompt,
    responses: Responses,
    hidden: Float[Array, "B t D"],
    num_attended: Int[Array, " B"],
) -> tuple[Array, Array, Array]:
    """Compute the three scores of one layer's attention rows."""
    states, num_prompt = prompt.hidden, prompt.hidden.shape[1]
    context = jnp.where(prompt.is_context[:, None, None, :], weights[..., :num_prompt], 0.0)
    mass = jnp.sum(context, axis=-1)
    generated = mask[:, :, num_prompt:] & responses.is_generated[:, None, :]
    num_generated = jnp.sum(generated, axis=-1)[:, None]
    new = jnp.sum(jnp.where(generated[:, None], weights[..., num_prompt:], 0.0), axis=-1)
    old = mass / jnp.maximum(jnp.sum(prompt.is_context, axis=1), 1)[:, None, None]
    new = new / jnp.maximum(num_generated, 1)
    total = old + new
    lookback = jnp.where(total > 0, old / jnp.where(total > 0, total, 1.0), 0.0)

    return _external(context, states, hidden, num_attended), mass, lookback


def _external(
    context: Float[Array, "B N t P"],
    states: Float[Array, "B P D"],
    hidden: Float[Array, "B t D"],
    num_attended: Int[Array, " B"],
) -> Float[Array, "B N t"]:
    """External context score of attention weights; the native kernel, if available, sums only the chosen states."""
    if hidden.dtype == jnp.float32 and jax.default_backend() == "cpu" and library.is_available():
        calls.register()
        call = jax.ffi.ffi_call("jaxbench_external", jax.ShapeDtypeStruct(context.shape[:-1], jnp.float32))
        return call(context, num_attended.astype(jnp.int32), states.astype(jnp.float32), hidden)
    chosen = (context >= kth_largest(context, num_attended)[..., None]) & (context > 0)
    attended = jnp.einsum("BNtP,BPD->BNtD", chosen.astype(states.dtype), states, preferred_element_type=hidden.dtype)
    dot = jnp.einsum("BNtD,BtD->BNt", attended, hidden)
    length = jnp.sqrt(jnp.sum(jnp.square(attended), axis=-1) * jnp.sum(jnp.square(hidden), axis=-1)[:, None])
    return jnp.where(length > 0, dot / jnp.where(length > 0, length, 1.0), 0.0)


def _by_layer(found: Float[Array, "Lt B N t"], tiles: int) -> Float[Array, "L N B T"]:
    """Join scores by tile."""
    split = found.reshape(-1, tiles, *found.shape[1:]).transpose(0, 3, 2, 1, 4)
    return split.reshape(*split.shape[:3], -1)


def kth_largest(values: Float[Array, "B N t P"], k: Int[Array, " B"]) -> Float[Array, "B N t"]:
    """Return the k-th largest of each row of non-negative values, 1 <= k <= P, by a search over its bits."""
    bits = jnp.finfo(values.dtype).bits
    whole = jnp.dtype(f"int{bits}")

    def refine(i: Array, found: Array) -> Array:
        candidate = found | (jnp.ones((), whole) << (bits - 2 - i).astype(whole))
        limit = lax.bitcast_convert_type(candidate, values.dtype)
        count = jnp.sum(values >= limit[..., None], axis=-1, dtype=jnp.int32)
        return jnp.where(count >= k[:, None, None], candidate, found)

    found = lax.fori_loop(0, bits - 1, refine, jnp.zeros(values.shape[:-1], whole))
    return lax.bitcast_convert_type(found, values.dtype)


def lens_logits(model: Any, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Logits of states after the final norm; with narrow weights, they are not rounded to the weights' type."""
    head = model.embed.embedding if model.head is None else model.head.kernel
    dimensions = (((1,), (1 if model.head is None else 0,)), ((), ()))
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = lax.dot_general(hidden, head[...], dimensions, preferred_element_type=wide)
    return logits if model.logit_softcap is None else functional.softcap(logits, cap=model.logit_softcap)


def parametric_scores(
    model: Any, trace: Trace, slots: Int[Array, " M"], num_slots: Int[Array, ""] | int
) -> Float[Array, "M L"]:
    """Parametric knowledge score of every layer: Jensen-Shannon divergence, in nats, of the logit lens before and
    after its feed-forward layer; 0 to ln 2.

    slots: indices into B * T; only the first num_slots are scored, the rest get zeros. Time grows with num_slots,
    memory only with the vocabulary.
    """
    layers, batch, length, width = trace.middle.shape
    before = trace.middle.reshape(layers, batch * length, width)
    behind = trace.stream[1:].reshape(before.shape)
    rows = len(slots) * layers
    tiles = -(-rows // LENS_TILE)
    wide = jnp.promote_types(before.dtype, jnp.float32)

    def add(i: Array, found: Array) -> Array:
        row = jnp.minimum(i * LENS_TILE + jnp.arange(LENS_TILE), rows - 1)
        layer, slot = row % layers, slots[row // layers]
        states = jnp.concatenate([before[layer, slot], behind[layer, slot]])
        logits = lens_logits(model, model.final_norm(states[None])[0])
        score = jensen_shannon(logits[:LENS_TILE], logits[LENS_TILE:])
        return lax.dynamic_update_slice_in_dim(found, score, i * LENS_TILE, axis=0)

    used = (num_slots * layers + LENS_TILE - 1) // LENS_TILE
    found = lax.fori_loop(0, used, add, jnp.zeros(tiles * LENS_TILE, wide))[:rows].reshape(-1, layers)
    return jnp.where(jnp.arange(len(slots))[:, None] < num_slots, found, 0.0)


def jensen_shannon(left: Float[Array, "R V"], right: Float[Array, "R V"]) -> Float[Array, " R"]:
    """Jensen-Shannon divergence of the distributions of two rows of logits, in nats."""
    left, right = jax.nn.log_softmax(left, axis=-1), jax.nn.log_softmax(right, axis=-1)
    p, q = jnp.exp(left), jnp.exp(right)
    mean = 0.5 * (p + q)
    middle = jnp.log(jnp.where(mean > 0, mean, 1.0))
    terms = jnp.where(p > 0, p * (left - middle), 0.0) + jnp.where(q > 0, q * (right - middle), 0.0)
    return 0.5 * jnp.sum(terms, axis=-1)


def surprise(model: Any, trace: Trace, targets: Int[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Negative log-probability of each slot's target, and entropy of its distribution, in nats."""
    hidden = trace.hidden.reshape(-1, trace.hidden.shape[-1])
    rows = len(hidden)
    tiles = -(-rows // LENS_TILE)
    hidden = jnp.pad(hidden, ((0, tiles * LENS_TILE - rows), (0, 0))).reshape(tiles, LENS_TILE, -1)
    wanted = jnp.pad(targets.reshape(-1), (0, tiles * LENS_TILE - rows)).reshape(tiles, LENS_TILE)

    def of_tile(tile: tuple[Array, Array]) -> tuple[Array, Array]:
        log_probs = jax.nn.log_softmax(lens_logits(model, tile[0]), axis=-1)
        probs = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0), axis=-1)
        return -jnp.take_along_axis(log_probs, tile[1][:, None], axis=-1)[:, 0], entropy

    return tuple(each.reshape(-1)[:rows].reshape(targets.shape) for each in lax.map(of_tile, (hidden, wanted)))
