"""Where everything of one training run over a mesh lives; mesh_plan.py makes a plan."""

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
    """Where everything of one training run lives."""

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
        """True where the step runs a pipeline schedule."""
        return self.mesh.shape[STAGE] > 1 or self.config.micro_batches > 1

    def elements_per_chip(self) -> tuple[int, int]:
        """Elements of parameters that one chip stores, and that it uses once they are gathered."""
        shapes = initial.parameter_shapes(self.model).items()
        stored, used = (
            sum(math.prod(where[name].shard_shape(shape)) for name, shape in shapes)
            for where in (self.params, self.used)
        )
        return stored, used
