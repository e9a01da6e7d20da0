"""Base of the arms of jaxbench's own decoders: loading, AdamW's plain step, and the step of a training run.

The step of a run is what experiments/train.py computes, through the backend's Engine. Weights and moments are float32,
products are in the arm's type (precision.py), and AdamW and clipping are those of the default StepConfig. Only the step
of a run is measured: no evaluation, checkpoint or tokenising.
"""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any

import numpy as np

from jaxbench.bench.arms import contract
from jaxbench.text.dataset import Batch
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig


class TwinArm(contract.Arm):
    """An arm of Flax, Equinox or PyTorch; a subclass adds the parts specific to its framework."""

    package = ""  # package of transformer and training.engine
    functions = ""  # package of sample, train and the optimiser step
    has_kernels = False  # a run's step may use native products
    attention = "dense"  # attention implementation of a run's step if the suite has the default, dense

    def _import(self) -> None:
        self.transformer = importlib.import_module(f"{self.package}.transformer")
        self.sample = importlib.import_module(f"{self.functions}.sample")
        self.train = importlib.import_module(f"{self.functions}.train")
        self.update = importlib.import_module(f"{self.functions}.training.optimizer_step")
        self._drop()

    def _drop(self) -> None:
        """Drop what `load` and `prepare` made."""
        self.model = self.generator = self.state = self.step = self.run_settings = self.engine = None

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Read the checkpoint and build the model; with `train`, the train step's state too."""
        from jaxbench.pretrained import weights
        from jaxbench.training import precision

        self.dtype = dtype
        checkpoint = weights.load_checkpoint(self.checkpoint)
        config, params = contract.shallow(checkpoint.config, checkpoint.params, num_layers)
        if train is not None and train["form"] == "run":
            self.run_settings, self.shape, self.params = train, config, params
            return
        self.model = self._build(config, params, is_trained=train is not None)
        if train is None:
            self.generator = self.sample.Generator(self.model, eos_id=None, sampling=self.sample.SamplingParams())
        else:
            policy, plain = precision.uniform(dtype), {"step_config": contract.PLAIN_STEP, "is_guarded": False}
            self.state = self.update.init_state(self.model, params, contract.PLAIN_STEP, policy=policy)
            self.step = functools.partial(self.update.train_step, learning_rate=train["learning_rate"], **plain)
        self.synchronize()

    def _build(self, config: Any, params: dict[str, np.ndarray], *, is_trained: bool) -> Any:
        return self.transformer.build(config, params, dtype=self.dtype)

    def _make_engine(self, *, torch_compile: bool = False, **place: Any) -> dict:
        """Make the engine of a run (place: its device in PyTorch); return its device's name and compile seconds."""
        train, params = self.run_settings, self.params
        self.params = None  # the engine holds its own copy
        kernels = train.get("kernels", "auto") if self.has_kernels else "auto"
        accumulation = train.get("accumulation", 1)
        step = StepConfig(
            precision=self.dtype, torch_compile=torch_compile, accumulation=accumulation, kernels=kernels
        )  # fmt: skip
        chosen = train.get("implementation", "dense")
        attention = self.attention if chosen == "dense" else chosen
        settings = TrainConfig(
            model=self.shape.model_dump(), batch_size=train["batch"], steps=1, learning_rate=train["learning_rate"],
            data={"seq_len": train["seq_len"], "document_mask": train.get("document_mask", True)},
            step=step, implementation=attention,
        )  # fmt: skip
        self.engine = importlib.import_module(f"{self.package}.training.engine").Engine(
            settings, self.shape, params, **place
        )
        facts = {"device_kind": self.engine.device_kind()}
        return facts | ({"compile_s": self.engine.compile_seconds} if self.engine.compile_seconds else {})

    def _step(self, inputs: list) -> dict:
        """Take one step of either form; its time ends when its loss is on the host and the device is idle."""
        if self.engine is None:
            batch = self._batch(inputs)
            start = time.perf_counter()
            self.state, metrics = self.step(self.state, batch)
            loss = float(metrics.loss)
        else:
            tokens, targets, positions = contract.targets(inputs)  # one document per row
            batch = Batch(tokens, targets, positions, np.ones(tokens.shape, bool), np.ones(tokens.shape, np.int32))
            start = time.perf_counter()
            loss = self.engine.fetch(self.engine.step(batch, self.run_settings["learning_rate"])).loss
        self.synchronize()
        return {"step_s": time.perf_counter() - start, "loss": loss}
