"""Held-out figures of a compressor during training.

Vectors may only tell the decoder that a text of this kind continues, whatever its content. So targets are also
evaluated after the vectors of another row: the difference is what a text's own vectors add.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import parameters
from jaxbench.compress import compressor, rows
from jaxbench.compress.config import CompressorConfig
from jaxbench.compress.material import Material
from jaxbench.compress.train_config import TrainingConfig

KINDS = {rows.RECONSTRUCT: "reconstruct", rows.CONTINUE: "continue", rows.ANSWER: "answer"}


class Judge:
    """Held-out figures of parameters, on the same rows every time."""

    def __init__(self, settings: TrainingConfig, shape: CompressorConfig, graph: Any, materials: Sequence[Material]):
        self._dtype, self._vocabulary, self._prefix = settings.precision, shape.decoder.vocab_size, shape.prefix
        self._program = jax.jit(functools.partial(_judged, graph))
        self._batches: list[rows.Arrays] = []
        for material in materials:
            chosen = {"ratio": settings.held_out_ratio, "dropout": 0.0, "short": 0.0, "in_clear": 0.0}
            for i in range(settings.held_out_batches):
                kind = material.rows.model_copy(update=chosen | {"reconstruct": float(i % 2)})
                self._batches.append(material.draw(kind, seed=2**32 + settings.seed, step=i).arrays)

    def __call__(self, params: Mapping[str, jax.Array]) -> dict[str, float]:
        """Loss in nats per token and accuracy by kind of target, and accuracy of the local head.

        <kind>_own is how much lower the loss is after a row's own vectors than after another row's.
        """
        cast = {name: value.astype(self._dtype) for name, value in params.items()}
        sums: dict[str, list[np.ndarray]] = {}
        for arrays in self._batches:
            count = arrays.groups[0].size
            losses, right, local = map(np.asarray, self._program(cast, compressor.Batch(*arrays)))
            tags = (arrays.inputs[:, count] - self._vocabulary - count) // self._prefix
            other = None
            if len(tags) > 1:
                other = np.asarray(self._program(cast, compressor.Batch(*_turned(arrays)))[0])
            for tag, kind in KINDS.items():
                counts = arrays.mask & (tags == tag)[:, None]
                if not counts.any():
                    continue
                sums.setdefault(f"{kind}_loss", []).append(losses[counts])
                sums.setdefault(f"{kind}_accuracy", []).append(right[counts])
                if other is not None:
                    sums.setdefault(f"{kind}_own", []).append((other - losses)[counts])
            if (tags != rows.ANSWER).all():
                sums.setdefault("local_accuracy", []).append(local[arrays.sampled.reshape(local.shape) >= 0])
        return {name: float(np.concatenate(parts).mean()) for name, parts in sums.items()}


def _turned(arrays: rows.Arrays) -> rows.Arrays:
    """Rows with each other's passages; where lengths differ, vectors and positions move with the passages."""
    turned = arrays._replace(context=np.roll(arrays.context, 1, axis=0))
    groups = np.roll(arrays.groups, 1, axis=0)
    if np.array_equal(groups, arrays.groups):
        return turned
    vectors, behind = np.split(arrays.positions, [arrays.groups[0].size], axis=1)
    ends = behind[:, :1]  # position of the tag
    behind = np.where(behind >= 0, behind - ends + np.roll(ends, 1, axis=0), -1)
    positions = np.concatenate([np.roll(vectors, 1, axis=0), behind], axis=1).astype(np.int32)
    return turned._replace(groups=groups, positions=positions)


def _judged(graph: Any, params: Mapping[str, jax.Array], batch: compressor.Batch) -> tuple[jax.Array, ...]:
    """Loss and hits of every target, and hits of the local head."""
    output = compressor.predict(parameters.merge(graph, params), batch)
    wide = output.logits.astype(jnp.float32)
    picked = jnp.take_along_axis(wide, batch.targets[:, :, None], axis=2)[:, :, 0]
    losses = jax.nn.logsumexp(wide, axis=2) - picked
    own = jnp.take_along_axis(batch.context, jnp.maximum(batch.sampled, 0), axis=2).reshape(len(batch.context), -1)
    right, local = jnp.argmax(wide, axis=2) == batch.targets, jnp.argmax(output.local, axis=2) == own
    return losses, right, local
