"""Tensor-parallel decoding: one decoder over several devices; its heads, feed-forward width and embedding are split.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. The programs are sample.py's and follow the parameters: a
device multiplies by its part of a kernel, and two sums over devices per layer combine the parts. Keys and values are
split by rows' heads, tokens are on every device. This is meant for one row: with several rows, data moves between
devices in every layer, since the cache stores all heads of a row next to each other.

Twin: torch_ref/parallel/decoding.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbench import parameters, sample, sharding, transformer
from jaxbench.config import TransformerConfig
from jaxbench.mesh import MODEL

HELD = r"\.(kernel|codes|scales|zeros)"  # a matrix: floats, or integers with their scales and zeros


def attached(device: str, count: int) -> list[jax.Device]:
    """Return the first `count` devices of a kind: cpu, gpu or tpu.

    Raises:
      ValueError: JAX sees fewer.
    """
    seen = jax.devices(device)
    if len(seen) < count:
        simulated = " (XLA_FLAGS=--xla_force_host_platform_device_count)" if device == "cpu" else ""
        raise ValueError(
            f"--tensor_parallel={count}: JAX sees {len(seen)} devices of the kind {device}{simulated}; wanted at most "
            "as many"
        )
    return seen[:count]


def build(
    config: TransformerConfig, params: Mapping[str, np.ndarray], devices: Sequence[jax.Device], **compute: Any
) -> transformer.Transformer:
    """Build a decoder that is split over devices; no device ever holds more than its part, the host holds all of it.

    compute: as transformer.build takes it, without projection_groups.

    Raises:
      ValueError: as transformer.build or `split` raise.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        model = transformer.build(config, params, **compute)
    split(model, config, devices)
    return model


def split(model: transformer.Transformer, config: TransformerConfig, devices: Sequence[jax.Device]) -> None:
    """Shard a decoder's parameters over devices, in place; floats or packed weights (quantization/weight_only.py).

    Build the decoder without projection_groups: otherwise kernels would be concatenated in every step.

    Raises:
      ValueError: the devices do not divide the key-value heads.
    """
    state, mesh = nnx.state(model), sharding.make_mesh({MODEL: len(devices)}, devices)
    nnx.update(model, jax.device_put(state, shardings(state, config, mesh)))


def shardings(state: Any, config: TransformerConfig, mesh: Mesh) -> Any:
    """Return the sharding of every parameter of a decoder's state (arrays or shapes), as the same tree.

    Raises:
      ValueError: the mesh's devices do not divide the key-value heads.
    """
    if config.num_kv_heads % mesh.size:
        raise ValueError(f"decoding: num_kv_heads={config.num_kv_heads} over {mesh.size} devices; wanted a divisor")
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    named = {parameters.dotted(path): leaf for path, leaf in leaves}
    table = sharding.decoder_table(config, stored=None, out=MODEL, heads=MODEL, width=None)
    rules = [(pattern.replace(r"\.kernel", HELD), spec) for pattern, spec in table]
    places = sharding.parameter_shardings({name: leaf.shape for name, leaf in named.items()}, rules, mesh)
    # XLA:GPU looks up a single row by a slice; it would first gather a table that is split by rows.
    is_even = config.d_model % mesh.size == 0
    places["embed.embedding"] = NamedSharding(mesh, P(None, MODEL) if is_even else P())
    for name, leaf in named.items():
        if name.endswith((".scales", ".zeros")) and leaf.shape[0] == 1:  # one for all inputs, however they are split
            codes = places[f"{name.rpartition('.')[0]}.codes"].spec
            places[name] = NamedSharding(mesh, P(None, *codes[1:]))
    return jax.tree.unflatten(structure, [places[name] for name in named])


class Generator(sample.Generator):
    """Generator for a decoder that `split` has sharded.

    Raises:
      ValueError: no array of the decoder is on a mesh.
    """

    def __init__(self, model: transformer.Transformer, **options: Any):
        super().__init__(model, **options)
        leaves = self._weights.leaves
        placed = (getattr(leaf, "sharding", None) for leaf in leaves)
        meshes = [place.mesh for place in placed if isinstance(place, NamedSharding)]
        if not meshes:
            raise ValueError(
                f"decoding: none of the decoder's {len(leaves)} arrays lies on a mesh; call decoding.split first"
            )
        self._mesh = meshes[0]

    def _place(self, shapes: Callable[[], sample.DecodeState]) -> Any:
        state, whole, by_head = shapes(), NamedSharding(self._mesh, P()), NamedSharding(self._mesh, P(MODEL))
        keys, values = (jax.tree.map(lambda _: by_head, part) for part in (state.cache.keys, state.cache.values))
        place = jax.tree.map(lambda _: whole, state)
        return place._replace(cache=place.cache._replace(keys=keys, values=values))

    def _prefill(self, *arguments: Any) -> sample.DecodeState:
        with self._whole_residual():
            return super()._prefill(*arguments)

    def _decode(self, *arguments: Any, **options: Any) -> sample.DecodeState:
        with self._whole_residual():
            return super()._decode(*arguments, **options)

    def _whole_residual(self) -> contextlib.AbstractContextManager[None]:
        """Replicate the residual stream: split like the embedding, it would be gathered in every layer."""
        whole = NamedSharding(self._mesh, P())
        return sharding.activations({"residual": lambda x: jax.lax.with_sharding_constraint(x, whole)})
