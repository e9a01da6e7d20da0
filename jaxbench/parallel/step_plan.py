"""Placement of everything in one training run over a mesh; mesh_plan.py makes a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.mesh import STAGE, ParallelConfig

Shardings = Mapping[str, NamedSharding]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of everything in one training run."""

    mesh: Mesh
    config: ParallelConfig
    model: TransformerConfig
    params: Shardings  # parameters between steps, by dotted name
    used: Shardings  # parameters as the model computes with them
    gradients: Shardings  # gradients as the optimiser gets them
    moments: Shardings  # optimiser state of each parameter's shape
    batch: NamedSharding  # every array [B T] of a batch
    points: Mapping[str, NamedSharding]  # activations at named points

    @property
    def is_pipelined(self) -> bool:
        """True if the step runs a pipeline schedule."""
        return self.mesh.shape[STAGE] > 1 or self.config.micro_batches > 1

    def elements_per_chip(self) -> tuple[int, int]:
        """Parameter elements that one chip stores, and that it uses once they are gathered.

        In a pipeline a chip uses its stage's layers, and everything outside the layers (pipeline.py).
        """
        shapes = initial.parameter_shapes(self.model)
        count = lambda where, names: sum(math.prod(where[name].shard_shape(shapes[name])) for name in names)
        stored = count(self.params, shapes)
        if not self.is_pipelined:
            return stored, count(self.used, shapes)
        layers = [name for name in shapes if name.startswith("layers.")]
        ends = sum(math.prod(shape) for name, shape in shapes.items() if name not in set(layers))
        return stored, count(self.used, layers) // self.mesh.shape[STAGE] + ends
