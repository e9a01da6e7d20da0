"""How a training run is spread over devices: mesh axes, their sizes, and what each one splits (S file).

Axes, the slowest links first: `stage` splits the layers (pipeline), `data` and `fsdp` the batch, `sequence` the tokens
of a row, `model` heads, feed-forward width and vocabulary. `fsdp` also splits what ZeRO splits. In the 2d form
`model_x` and `model_y` replace `model`: x splits the residual width, y what `model` splits (Pope et al. 2022,
arXiv:2211.05102, section 3.2.2).

The 2.5d form (Wang et al. 2021, arXiv:2105.14500) is the 2d form with `data` as its depth; the 3d form (Bian et al.
2021, arXiv:2105.14450) is the 2d form with `fsdp` as its third side and ZeRO stage 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import pydantic

from jaxbench.config import Base

STAGE, DATA, FSDP, SEQUENCE = "stage", "data", "fsdp", "sequence"
MODEL, MODEL_X, MODEL_Y = "model", "model_x", "model_y"
AXES = (STAGE, DATA, FSDP, SEQUENCE, MODEL)
ROWS = (STAGE, DATA, FSDP)  # the axes that split the rows of a batch; micro-batches are split over the stages
AXES_2D = (STAGE, DATA, FSDP, SEQUENCE, MODEL_X, MODEL_Y)
MAX_LISTED = 12  # factorisations spelled out in an error


class MeshConfig(Base):
    """Sizes of the mesh axes in devices; -1, at most once, = the devices that the other axes leave."""

    stage: int = 1  # pipeline stages
    data: int = -1  # replicas, each with its part of the batch
    fsdp: int = 1  # parts of the batch that also hold a part of what ZeRO splits
    sequence: int = 1  # parts of a row's tokens
    model: int = 1  # parts of heads, feed-forward width and vocabulary
    model_x: int = 1  # 2d form: parts of the residual width
    model_y: int = 1  # 2d form: parts of heads, feed-forward width and vocabulary

    @pydantic.model_validator(mode="after")
    def _check_sizes(self) -> MeshConfig:
        sizes = self.model_dump()
        bad = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
        if bad:
            raise ValueError(f"mesh: {_spelled(bad)}: a size is a number of devices from 1, or -1 = the rest")
        rest = [axis for axis, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"mesh: {' and '.join(rest)} are all -1, one axis takes the rest; give the others a size")
        if self.model != 1 and self.is_2d:
            raise ValueError(
                f"mesh: model={self.model} and model_x={self.model_x}, model_y={self.model_y} exclude each other: "
                "take model for tensor parallelism in 1d, model_x and model_y in 2d"
            )
        return self

    @property
    def is_2d(self) -> bool:
        """True in the 2d form, where model_x or model_y is used."""
        return self.model_x != 1 or self.model_y != 1

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Size of every axis of the form in use, in mesh order; their product is num_devices.

        Raises:
          ValueError: the sizes do not multiply to num_devices; the possible ones are listed.
        """
        sizes = {axis: getattr(self, axis) for axis in (AXES_2D if self.is_2d else AXES)}
        fixed = math.prod(size for size in sizes.values() if size > 0)
        rest = next((axis for axis, size in sizes.items() if size == -1), None)
        if num_devices < 1 or (num_devices % fixed if rest else num_devices != fixed):
            wanted = f"a multiple of {fixed}" if rest else f"{fixed}"
            raise ValueError(
                f"mesh: {_spelled(sizes)} needs {wanted} devices, there are {num_devices}; "
                f"possible: {_possible(sizes, num_devices)}"
            )
        return sizes | ({rest: num_devices // fixed} if rest else {})


class ParallelConfig(Base):
    """How one training step is spread over the devices of a mesh."""

    mesh: MeshConfig = MeshConfig()
    zero: Literal[0, 1, 2, 3] = 3  # what fsdp splits: 1 = optimiser state, 2 = + gradients, 3 = + parameters
    heads: Literal["split", "replicated"] = "split"  # attention over model; split needs head counts that it divides
    sequence_parallel: bool = False  # split norm and residual regions over model too, along the tokens
    sequence_attention: Literal["ring", "gathered"] = "ring"  # keys and values over `sequence`: passed on, or gathered
    schedule: Literal["gpipe", "1f1b"] = "1f1b"  # of the pipeline; unused with stage = 1 and micro_batches = 1
    gradient_type: Literal["full", "bfloat16", "float16"] = "full"  # in which gradients are summed over rows
    micro_batches: int = pydantic.Field(default=1, ge=1)  # parts of the batch; a multiple of stage


def factorisations(num_devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `axes` sizes whose product is num_devices, in rising order."""
    if axes == 0:
        if num_devices == 1:
            yield ()
        return
    for size in range(1, num_devices + 1):
        if num_devices % size == 0:
            for others in factorisations(num_devices // size, axes - 1):
                yield (size, *others)


def _possible(sizes: dict[str, int], num_devices: int) -> str:
    """List the factorisations over the axes that are not 1, those that keep most of the wanted sizes first."""
    used = [axis for axis, size in sizes.items() if size != 1] or [DATA]
    meshes = [dict(zip(used, factors)) for factors in factorisations(max(num_devices, 1), len(used))]
    meshes.sort(key=lambda mesh: -sum(size == sizes[axis] for axis, size in mesh.items()))
    more = f" and {len(meshes) - MAX_LISTED} more" if len(meshes) > MAX_LISTED else ""
    spelled = [", ".join(f"{axis}={size}" for axis, size in mesh.items()) for mesh in meshes[:MAX_LISTED]]
    return "; ".join(spelled) + more


def _spelled(sizes: dict[str, int]) -> str:
    used = {axis: size for axis, size in sizes.items() if size != 1} or {DATA: sizes.get(DATA, 1)}
    return ", ".join(f"{axis}={size}" for axis, size in used.items())
