"""Prefill, decode step and train step of the decoder on a mesh, with abstract arguments only.

No weights exist here: parameters, cache and optimiser state are shapes with shardings, so that a program for hundreds
of chips compiles on a laptop. The same programs also run on real arrays of these shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbench import parameters, sharding
from jaxbench.attention import KVCache
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.mesh import ROWS, MeshConfig, ParallelConfig
from jaxbench.parallel import mesh_plan
from jaxbench.parallel.step_plan import Plan
from jaxbench.train import Batch, loss_fn
from jaxbench.transformer import Transformer

# AdamW, Loshchilov and Hutter 2019, arXiv:1711.05101
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


class Program(NamedTuple):
    """A function ready for `lower`, its abstract arguments, and its parameter counts."""

    name: str  # prefill, decode, train
    jitted: Any  # jax.jit of the function
    arguments: tuple  # jax.ShapeDtypeStruct with shardings
    batch: int  # rows over all chips
    tokens: int  # prompt tokens, cache slots, or sequence length
    stored_parameters: int  # elements of parameters that one chip stores
    used_parameters: int  # elements that one chip computes with: those it stores, with fsdp weights gathered


class Abstract(NamedTuple):
    """A model without values: how to rebuild it from {dotted name: array}."""

    params: dict[str, jax.ShapeDtypeStruct]
    merge: Callable[[dict[str, jax.Array]], Transformer]


def abstract_model(
    config: TransformerConfig, *, dtype: str, scan_layers: bool, extension: Extension = Extension()
) -> Abstract:
    """Shapes of a model's parameters by dotted name and the function that puts arrays into the model.

    extension: what a workload adds to the decoder.
    """
    compute = Compute(dtype=dtype, scan_layers=scan_layers)
    graph, params = parameters.split(nnx.eval_shape(lambda: Transformer(config, compute, extension.make_layer)))
    return Abstract(params, functools.partial(parameters.merge, graph))


def make_plan(
    config: TransformerConfig,
    devices: Sequence[jax.Device],
    *,
    batch: int,
    tokens: int,
    model_axis: int = 1,
    is_split: bool = False,
    extension: Extension = Extension(),
) -> Plan:
    """Plan a program: the batch is split over all axes but the model axis.

    Args:
      devices: the chips, a multiple of model_axis.
      batch: rows over all chips.
      model_axis: chips that split feed-forward width and vocabulary; each computes the whole attention.
      is_split: the chips that split the batch store a part of every kernel each (fsdp), as training does.
      extension: what a workload adds to the decoder.

    Raises:
      ValueError: the batch or the model does not fit the mesh.
    """
    rows = len(devices) // model_axis
    mesh = MeshConfig(data=1, fsdp=rows, model=model_axis) if is_split else MeshConfig(data=rows, model=model_axis)
    parallel = ParallelConfig(mesh=mesh, zero=3, heads="replicated")
    return mesh_plan.make_plan(config, parallel, batch=batch, tokens=tokens, devices=devices, extension=extension)


def prefill(model: Abstract, plan: Plan, *, batch: int, tokens: int) -> Program:
    """Make the prefill program: it fills a cache from whole prompts; the head runs at the last position only."""

    def run(params: dict, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, KVCache]:
        transformer = model.merge(params)
        hidden, cache = transformer.features(token_ids, positions)
        return transformer.logits(hidden[:, -1:])[:, 0], cache

    params, rows = _placed_params(model, plan), NamedSharding(plan.mesh, P(ROWS))
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=plan.batch)
    jitted = jax.jit(run, out_shardings=_by_rows(jax.eval_shape(run, params, ids, ids), rows))
    return Program("prefill", jitted, (params, ids, ids), batch, tokens, *plan.elements_per_chip())


def decode(model: Abstract, plan: Plan, *, batch: int, length: int) -> Program:
    """Make the decode program: one greedy step over a donated cache of `length` slots."""

    def run(params: dict, cache: KVCache, token_ids: jax.Array, positions: jax.Array, slot: jax.Array):
        transformer = model.merge(params)
        hidden, cache = transformer.features(token_ids, positions, cache=cache, slot=slot)
        return jnp.argmax(transformer.logits(hidden), axis=-1).astype(jnp.int32), cache

    def first_cache(params: dict, token_ids: jax.Array) -> KVCache:
        """Cache after prompts of one token."""
        cache = model.merge(params).features(token_ids, token_ids)[1]
        return cache.padded(length, dtype=str(params["embed.embedding"].dtype))

    params = _placed_params(model, plan)
    rows, everywhere = NamedSharding(plan.mesh, P(ROWS)), NamedSharding(plan.mesh, P())
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=plan.batch)
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    cache = jax.eval_shape(first_cache, params, ids)
    placed = _by_rows(cache, rows)
    cache = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), cache, placed)
    jitted = jax.jit(run, out_shardings=(rows, placed), donate_argnums=1)
    return Program("decode", jitted, (params, cache, ids, ids, slot), batch, length, *plan.elements_per_chip())


def _by_rows(tree: Any, rows: NamedSharding) -> Any:
    """Sharding of arrays of rows; scalars are replicated."""
    everywhere = NamedSharding(rows.mesh, P())
    return jax.tree.map(lambda x: rows if x.ndim else everywhere, tree)


def train(model: Abstract, plan: Plan, *, batch: int, tokens: int) -> Program:
    """Make the training program: one AdamW step on the mean next-token loss; float32 moments, everything donated."""
    params, placed = _placed_params(model, plan), dict(plan.params)

    def step_loss(params: dict, token_ids: jax.Array, targets: jax.Array, positions: jax.Array) -> jax.Array:
        # Gathered where they are used; otherwise the partitioner splits activations over the weights' axis. Two layers
        # of SmolLM2 compiled for v5e:2x2, batch 8 x 512: 1,186 MB sent per chip and 1,135 MiB of temporaries without,
        # 160 MB and 355 MiB with this.
        gathered = {
            name: sharding.place_both_ways(x, plan.used[name], plan.gradients[name]) for name, x in params.items()
        }
        everything = jnp.ones(token_ids.shape, bool)
        return loss_fn(model.merge(gathered), Batch(token_ids, targets, positions, everything))

    def run(params, first, second, step, token_ids, targets, positions):
        loss, grads = jax.value_and_grad(step_loss)(params, token_ids, targets, positions)
        step = step + 1
        updated = {name: _adamw(params[name], grads[name], first[name], second[name], step) for name in params}
        return tuple({name: new[i] for name, new in updated.items()} for i in range(3)) + (step, loss)

    moments = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding) for name, x in params.items()}
    everywhere = NamedSharding(plan.mesh, P())
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=plan.batch)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    jitted = jax.jit(run, out_shardings=(placed, placed, placed, everywhere, everywhere), donate_argnums=(0, 1, 2, 3))
    arguments = (params, moments, moments, step, ids, ids, ids)
    return Program("train", jitted, arguments, batch, tokens, *plan.elements_per_chip())


def _adamw(param, grad, first, second, step):
    """Return (param, first moment, second moment) after one AdamW update, computed in float32."""
    grad = grad.astype(jnp.float32)
    first = BETA1 * first + (1 - BETA1) * grad
    second = BETA2 * second + (1 - BETA2) * grad * grad
    count = step.astype(jnp.float32)
    direction = (first / (1 - BETA1**count)) / (jnp.sqrt(second / (1 - BETA2**count)) + EPS)
    wide = param.astype(jnp.float32)
    return (wide - LEARNING_RATE * (direction + WEIGHT_DECAY * wide)).astype(param.dtype), first, second


def _placed_params(model: Abstract, plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract parameters where the plan stores them."""
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.params[name]) for name, x in model.params.items()
    }
