"""Parameters of a model by dotted name; models of Flax and of Equinox alike are pytrees of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Graph:
    """A model without its parameters' values."""

    names: tuple[str, ...]  # dotted, of its leaves
    structure: jax.tree_util.PyTreeDef


def dotted(path: tuple) -> str:
    """Dotted name of a leaf's path in a tree; the last step into a Flax parameter, `value`, is left out."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def split(model: Any) -> tuple[Graph, dict[str, Array]]:
    """Split a model into its graph, to be passed to `merge`, and its parameters by dotted name."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    params = {dotted(path): leaf for path, leaf in leaves}
    return Graph(tuple(params), structure), params


def merge(graph: Graph, params: Mapping[str, Array]) -> Any:
    """Rebuild a model from its graph and parameters by dotted name."""
    return jax.tree.unflatten(graph.structure, [params[name] for name in graph.names])
