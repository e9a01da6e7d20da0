"""The step of a training run as an arm measures it: what experiments/train.py computes, through the backend's Engine.

Weights and moments are float32, the arm's type is that of the products (precision.py), and AdamW and clipping are those
of the default StepConfig. Nothing of a run but its step is in the measurement: no evaluation, checkpoint or tokenising.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxbench.bench.arms import contract
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig


class Rows(NamedTuple):
    """One step's data, in numpy: the fields of train.Batch."""

    tokens: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]


class RunStep:
    """An Engine and the one step that is timed."""

    def __init__(
        self, package: str, checkpoint: Any, dtype: str, train: dict, *, torch_compile: bool = False, **place: Any
    ):
        """Name the engine of a package; `prepare` makes it.

        `train` has learning_rate, batch, seq_len, num_layers, and may have accumulation and implementation; `place` is
        the engine's device in PyTorch.
        """
        self._module, self._place = f"{package}.training.engine", place
        self._checkpoint, self._train = checkpoint, train
        accumulation = train.get("accumulation", 1)
        self._step = StepConfig(precision=dtype, torch_compile=torch_compile, accumulation=accumulation)
        self.engine: Any = None

    def prepare(self) -> dict:
        """Make the engine, which compiles; its device's name and its seconds of compiling."""
        config, params = contract.shallow(self._checkpoint.config, self._checkpoint.params, self._train["num_layers"])
        self._checkpoint = None  # the engine holds its own copy
        settings = TrainConfig(
            model=config.model_dump(), data={"seq_len": self._train["seq_len"]}, batch_size=self._train["batch"],
            steps=1, learning_rate=self._train["learning_rate"], step=self._step,
            implementation=self._train.get("implementation", "dense"),
        )  # fmt: skip
        self.engine = importlib.import_module(self._module).Engine(settings, config, params, **self._place)
        facts = {"device_kind": self.engine.device_kind()}
        return facts | ({"compile_s": self.engine.compile_seconds} if self.engine.compile_seconds else {})

    def measure(self, inputs: list, synchronize: Callable[[], None] = lambda: None) -> dict:
        """Take one step; its time ends when its loss is on the host and the device is idle."""
        tokens, targets, positions = contract.targets(inputs)  # one document a row
        batch = Rows(tokens, targets, positions, np.ones(tokens.shape, bool), np.ones(tokens.shape, np.int32))
        start = time.perf_counter()
        metrics = self.engine.fetch(self.engine.step(batch, self._train["learning_rate"]))
        synchronize()
        return {"step_s": time.perf_counter() - start, "loss": metrics.loss}
