"""Long float32 curves of the run's step: is Flax as near to PyTorch as PyTorch is to itself?

Both backends take the same steps on the same rows from the same weights, and again from weights moved by one unit in
the last place, which is as small as a difference can be, with the rows of every batch in reverse, which rounds every
step's sums differently, as another backend does; how far that carries either from its own curve is the noise band, and
Flax has to stay inside (gates.training_noise). A Flax that were noisier than PyTorch would widen the band itself, so
its own noise has to stay inside PyTorch's. test_optimizer_step.py takes 300 steps of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.parity import gates, run


class Curves(NamedTuple):
    """Losses by step of one comparison, nats per token."""

    flax: np.ndarray
    torch: np.ndarray
    perturbed: tuple[np.ndarray, ...]  # of PyTorch from weights moved by one ulp
    flax_perturbed: tuple[np.ndarray, ...]  # of Flax from the same weights

    def gates(self) -> tuple[gates.Gate, gates.Gate]:
        """Gates P7: Flax stays inside the band of both backends' noise, and its own noise inside that of PyTorch's."""
        moved = [self.torch + curve - self.flax for curve in self.flax_perturbed]
        noisiest = self.torch + np.max([np.abs(curve - self.torch) for curve in moved], axis=0)
        shared = {"reference": self.torch, "dtype": "float32"}
        return (
            gates.training_noise(self.flax, self.torch, (*self.perturbed, *moved), **shared),
            gates.training_noise(noisiest, self.torch, self.perturbed, **shared),
        )

    def gaps(self) -> dict[str, float]:
        """Largest and last gap to PyTorch's curve in nats: of Flax, and of the farthest perturbed curve."""
        own = np.max([np.abs(curve - self.torch) for curve in self.perturbed], axis=0)
        gap = np.abs(self.flax - self.torch)
        return {
            "flax_largest": float(gap.max()), "flax_last": float(gap[-1]),
            "torch_largest": float(own.max()), "torch_last": float(own[-1]),
        }  # fmt: skip


def record(
    engines: Mapping[str, Callable[[Mapping[str, np.ndarray]], Any]],
    params: Mapping[str, np.ndarray],
    batches: Callable[[], Iterable[Any]],
    rates: Sequence[float],
    *,
    num_perturbed: int = 2,
) -> Curves:
    """Training curves of "flax" and "torch", and of each from perturbed weights.

    Args:
      engines: backend -> a function of the initial values that returns an Engine.
      params: initial values by name.
      batches: returns the batches of the steps, the same every time.
      rates: learning rate of each step.
      num_perturbed: how many curves of each backend span the band.
    """
    random = np.random.default_rng(0)
    starts = [("flax", params), ("torch", params)]
    for values in [run.perturbed(params, random) for _ in range(num_perturbed)]:
        starts += [("torch", values), ("flax", values)]
    curves = []
    for place, (backend, values) in enumerate(starts):
        engine, losses = engines[backend](values), []
        for batch, rate in zip(batches(), rates, strict=True):
            rows = batch if place < 2 else type(batch)(*(np.ascontiguousarray(part[::-1]) for part in batch))
            losses.append(engine.fetch(engine.step(rows, rate)).loss)
        curves.append(np.array(losses))
    return Curves(curves[0], curves[1], tuple(curves[2::2]), tuple(curves[3::2]))
