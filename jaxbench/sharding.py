"""Where every parameter and activation of the decoder lives on a mesh: tables of (parameter-name regex, PartitionSpec).

Models know nothing of meshes. A table must account for every parameter and every rule must match at least one, so that
a renamed parameter cannot silently fall back to replication. Activations are placed at named points: a model calls
`constrain(x, "residual")`, which does nothing until a step runs under `activations(...)`. Axes: jaxbench/mesh.py.

If an axis does not divide its dim, it always moves to the largest dim of that parameter that it divides and that no
axis splits (the first among equals); if there is none, the parameter is replicated over it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbench.config import TransformerConfig

POINTS = (
    "residual",  # the residual stream [B T D]: after the embedding and after each branch is added
    "attention_in",  # input of a block's attention [B T D]: the norm's output
    "attention_out",  # its output [B T D]
    "mlp_in",  # the same for its feed-forward layer
    "mlp_out",
)
PINNED_HOST = "pinned_host"  # JAX's name for host memory that a device reads directly
Rule = tuple[str, P]
Axes = str | tuple[str, ...] | None  # mesh axes that split one dim, the outermost first


def decoder_table(model: TransformerConfig, *, stored: Axes, out: Axes, heads: Axes, width: Axes) -> tuple[Rule, ...]:
    """Sharding rules (regular expression of parameter names, PartitionSpec) of a decoder.

    Args:
      model: the decoder, whose parts determine which parameters there are.
      stored: splits every kernel in storage; it is gathered where it is used (fsdp).
      out: splits feed-forward width and vocabulary (Shoeybi et al. 2019, arXiv:1909.08053).
      heads: splits query and key-value heads; None leaves attention whole.
      width: splits the residual width, the 2d form (Pope et al. 2022, arXiv:2211.05102, section 3.2.2).
    """
    layer = r"layers\.\d+\."
    wide = "(gate_proj|up_proj)" if model.is_gated else "up_proj"
    rows = joined(width, stored)
    norms = "(attention|mlp)_(norm|post_norm)" if model.post_norms else "(attention_norm|mlp_norm)"
    rules = [
        (r"embed\.embedding", P(out, rows)),
        (layer + r"attention\.(q_proj|k_proj|v_proj)\.kernel", P(rows, heads)),
        (layer + r"attention\.o_proj\.kernel", P(heads, rows)),
        (layer + rf"mlp\.{wide}\.kernel", P(rows, out)),
        (layer + r"mlp\.down_proj\.kernel", P(out, rows)),
        (rf"({layer}{norms}|final_norm)\.scale", P(width)),
    ]
    if model.norm == "layernorm":
        rules.append((rf"({layer}{norms}|final_norm)\.bias", P(width)))
    if model.position == "learned":
        rules.append((r"position\.embedding", P(None, rows)))
    if model.qk_norm:  # one scale for all heads, however they are split
        rules.append((layer + r"attention\.(q_norm|k_norm)\.scale", P()))
    if model.use_bias or model.qkv_bias:
        rules.append((layer + r"attention\.(q_proj|k_proj|v_proj)\.bias", P(heads)))
    if model.use_bias:
        rules.append((layer + rf"mlp\.{wide}\.bias", P(out)))
        rules.append((layer + r"(attention\.o_proj|mlp\.down_proj)\.bias", P(width)))
    if not model.tie_embeddings:
        rules.append((r"head\.kernel", P(rows, out)))
    return tuple(rules)


def axes_of(entry: Axes) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def joined(*entries: Axes) -> Axes:
    """Join entries of a PartitionSpec into one that splits by all their axes."""
    flat = tuple(axis for entry in entries for axis in axes_of(entry))
    return flat[0] if len(flat) == 1 else flat or None


def parameter_specs(
    shapes: Mapping[str, tuple[int, ...]], rules: Sequence[Rule], axis_sizes: Mapping[str, int]
) -> dict[str, P]:
    """PartitionSpec of every parameter; the first rule that matches a whole name decides.

    Raises:
      ValueError: a parameter without a rule, a rule without a parameter, or a rule longer than the shape.
    """
    patterns = [pattern for pattern, _ in rules]
    matched = {name: next((i for i, p in enumerate(patterns) if re.fullmatch(p, name)), None) for name in shapes}
    missing = [name for name, index in matched.items() if index is None]
    unused = [pattern for index, pattern in enumerate(patterns) if index not in matched.values()]
    if missing or unused:
        raise ValueError(
            f"sharding: parameters without a rule: {missing or 'none'}; "
            f"rules that match no parameter: {unused or 'none'}"
        )
    return {name: fit_spec(rules[i][1], shapes[name], axis_sizes, name=name) for name, i in matched.items()}


def fit_spec(spec: P, shape: tuple[int, ...], axis_sizes: Mapping[str, int], *, name: str = "parameter") -> P:
    """PartitionSpec with every axis on a dim that it divides, moved or dropped as the module's docstring says.

    Raises:
      ValueError: the spec has more dims than the shape.
    """
    if len(spec) > len(shape):
        raise ValueError(f"sharding: the rule for {name} has {len(spec)} dims, {spec}, but its shape is {shape}")
    wanted = list(spec) + [None] * (len(shape) - len(spec))
    placed: list[Axes] = [None] * len(shape)
    left = list(shape)  # size of each dim's part
    unplaced = []
    for dim, entry in enumerate(wanted):
        for axis in axes_of(entry):
            size = axis_sizes.get(axis, 1)
            if size > 1 and left[dim] % size == 0:
                placed[dim], left[dim] = joined(placed[dim], axis), left[dim] // size
            elif size > 1:
                unplaced.append(axis)
    for axis in unplaced:
        free = [d for d, size in enumerate(shape) if placed[d] is None and size % axis_sizes[axis] == 0 and size]
        if free:
            placed[max(free, key=lambda d: (shape[d], -d))] = axis
    return P(*placed)


def parameter_shardings(
    shapes: Mapping[str, tuple[int, ...]], rules: Sequence[Rule], mesh: Mesh
) -> dict[str, NamedSharding]:
    """NamedSharding of every parameter on `mesh`, see `parameter_specs`."""
    specs = parameter_specs(shapes, rules, dict(mesh.shape))
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def gathered(stored: NamedSharding, axes: Sequence[str]) -> NamedSharding:
    """Sharding of an array after an all-gather over `axes`: the same without its splits over them."""
    kept = (tuple(axis for axis in axes_of(entry) if axis not in axes) for entry in stored.spec)
    return NamedSharding(stored.mesh, P(*map(joined, kept)))


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with these axis sizes, in order, over `devices` (all of the default backend when None).

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    wanted = int(np.prod(list(sizes.values()), dtype=np.int64))
    if wanted != len(devices):
        raise ValueError(f"sharding: a mesh of {dict(sizes)} needs {wanted} devices, there are {len(devices)}")
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def place_both_ways(value: jax.Array, used: NamedSharding, gradient: NamedSharding) -> jax.Array:
    """Sharding constraint `used` on a value, and `gradient` on its gradient."""
    return jax.lax.with_sharding_constraint(value, used)


def _place_forward(value: jax.Array, used: NamedSharding, gradient: NamedSharding) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(value, used), None  # not itself: rematerialisation looks for this primitive


def _place_backward(used: NamedSharding, gradient: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(grad, gradient),)


place_both_ways.defvjp(_place_forward, _place_backward)


class _Actions(NamedTuple):
    """Arguments of the `activations` that the running step is traced in."""

    points: Mapping[str, Callable[[jax.Array], jax.Array]]
    attention: Callable[..., jax.Array] | None
    weights: Callable[[Any, int], Any] | None


_ON_ONE_DEVICE = _Actions({}, None, None)
_actions: contextvars.ContextVar[_Actions] = contextvars.ContextVar("activations", default=_ON_ONE_DEVICE)


@contextlib.contextmanager
def activations(
    points: Mapping[str, Callable[[jax.Array], jax.Array]],
    *,
    attention: Callable[..., jax.Array] | None = None,
    weights: Callable[[Any, int], Any] | None = None,
) -> Iterator[None]:
    """Place the activations of whatever is traced inside; enter it inside the compiled function.

    Args:
      points: an action for each of some POINTS.
      attention: computes attention itself over whole rows, from its arguments; see `mesh_attention`.
      weights: takes the parameters of a recomputed or scanned layer, and its index; see `layer_weights`.

    Raises:
      ValueError: an action for a point that does not exist.
    """
    unknown = sorted(set(points) - set(POINTS))
    if unknown:
        raise ValueError(f"sharding: no activation points {unknown}, known: {', '.join(POINTS)}")
    token = _actions.set(_Actions(points, attention, weights))
    try:
        yield
    finally:
        _actions.reset(token)


def constrain(x: jax.Array, point: str) -> jax.Array:
    """Apply the running step's sharding constraint to an activation at a named point; without one, return x itself.

    Raises:
      ValueError: the point is not one of POINTS.
    """
    if point not in POINTS:
        raise ValueError(f"sharding: no activation point {point!r}, known: {', '.join(POINTS)}")
    action = _actions.get().points.get(point)
    return x if action is None else action(x)


def layer_weights(state: Any, index: int) -> Any:
    """Parameters of one layer as the running step computes with them, e.g. gathered; without an action, as they are.

    Called inside what the backward pass recomputes, or inside the loop over layers: what is gathered here is gathered
    for this layer only, and not kept.
    """
    action = _actions.get().weights
    return state if action is None else action(state, index)


def mesh_attention() -> Callable[..., jax.Array] | None:
    """Attention of the running step over its mesh, mesh_plan.attend; None without a mesh."""
    return _actions.get().attention
