"""PyTorch arms: the plain twin (torch_ref) run eagerly, and the same under torch.compile."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxbench.bench.arms import contract, twin_arm
from jaxbench.measure import worker
from jaxbench.measure.records import Workload


class TorchBase(contract.Arm):
    """What the twin and Hugging Face share: devices, threads, the roofline loops."""

    packages = ("torch", "numpy", "python")

    def start(self) -> str:
        """Import torch and set its threads."""
        import torch

        torch.set_num_threads(self.threads)
        if self.device == "gpu" and not torch.cuda.is_available():
            return "this PyTorch build sees no GPU"
        self.torch, self.torch_device = torch, "cuda" if self.device == "gpu" else "cpu"
        self.model = None
        return ""

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.torch_device == "cuda":
            self.torch.cuda.synchronize()

    def prepare(self, workload: Workload) -> dict:
        """Eager code has nothing to compile."""
        return {}

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """One run of a workload."""
        if workload.kind == "train":
            return self._step(inputs)
        with self.torch.inference_mode():
            return self._generate(workload, inputs, limit)

    def unload(self) -> None:
        """Drop the model."""
        self.model = None
        if self.torch_device == "cuda":
            self.torch.cuda.empty_cache()

    def device_memory(self) -> int | None:
        """Peak of allocated device memory in bytes; None on the CPU."""
        return int(self.torch.cuda.max_memory_allocated()) if self.torch_device == "cuda" else None

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Times of summing a float32 array of `size` bytes."""
        array = self.torch.ones(size // 4, device=self.torch_device)
        return worker.timed(lambda: float(array.sum()), repeats)["seconds"]

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Times of one matrix product."""
        (m, k, n), place = shape, {"dtype": getattr(self.torch, dtype), "device": self.torch_device}
        left, right = self.torch.ones((m, k), **place), self.torch.ones((k, n), **place)

        def run() -> None:
            self.torch.mm(left, right)
            self.synchronize()

        return worker.timed(run, repeats)["seconds"]

    def profile(self, workload: Workload, inputs: list, folder: str) -> str:
        """Write a Chrome trace of one run."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.torch_device == "cuda" else [])
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{self.name}-{workload.label().replace(' ', '-')}.trace.json")
        with profile(activities=activities) as trace:
            self.measure(workload, inputs)
        trace.export_chrome_trace(path)
        return path

    def _on_device(self, inputs: list):
        """Inputs, targets and positions [B T] of the train step, as tensors."""
        return (self.torch.from_numpy(each.copy()).to(self.torch_device) for each in contract.targets(inputs))

    def _generate(self, workload: Workload, inputs: list, limit: int | None) -> dict:
        raise NotImplementedError(f"{self.name}: generate {workload.label()} up to {limit}")


class EagerArm(TorchBase, twin_arm.TwinArm):
    """The twin in torch_ref, run eagerly."""

    name = "torch_eager"
    package = functions = "torch_ref"
    is_compiled = False

    def start(self) -> str:
        """Import the twin's modules."""
        reason = super().start()
        self._import()
        return reason

    def _build(self, config: Any, params: dict[str, np.ndarray], *, is_trained: bool) -> Any:
        how = {"dtype": self.dtype, "implementation": "fused"}  # PyTorch's own attention kernel
        model = self.transformer.build(config, params, device=self.torch_device, **how)
        return model if is_trained else model.eval().requires_grad_(False)

    def prepare(self, workload: Workload) -> dict:
        """Make the engine of a run's step; other eager code has nothing to compile."""
        if self.run_settings is None:
            return {}
        return self._make_engine(torch_compile=self.is_compiled, device=self.torch_device)

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after one row, without a cache."""
        row = self.torch.tensor([tokens], device=self.torch_device)
        with self.torch.inference_mode():
            return self.model(row, None)[0, -1].float().cpu().numpy()

    def unload(self) -> None:
        """Drop model, generator and optimiser."""
        self._drop()
        super().unload()

    def _batch(self, inputs: list):
        tokens, targets, _ = self._on_device(inputs)
        return self.train.Batch(tokens, targets, None, self.torch.ones_like(tokens, dtype=self.torch.bool))

    def _generate(self, workload: Workload, inputs: list, limit: int | None) -> dict:
        return contract.generate(self.generator, inputs, workload, lambda tokens: tokens.cpu().numpy(), limit=limit)


class CompiledArm(EagerArm):
    """The twin under torch.compile (Inductor, default mode, static shapes): model passes and the train step."""

    name = "torch_compile"
    is_compiled = True

    def start(self) -> str:
        """Import the compiler and check that Inductor can build code here."""
        reason = super().start()
        importlib.import_module("torch._dynamo")  # seconds, and no part of loading a model
        if not reason and self.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            reason = "torch.compile needs a C++ compiler (g++ or clang++), none is on the PATH"
        return reason

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load as eager does, then compile layer by layer.

        All layers share one program a shape (PyTorch's "regional compilation"): the whole model at once took 25-38 s a
        shape to compile on a busy machine, layer by layer 5-14 s, and there are ten shapes.
        """
        self.torch._dynamo.reset()
        self.torch._dynamo.config.recompile_limit = 64  # one program a shape, as the JAX arms have
        super().load(dtype, num_layers=num_layers, train=train)
        if self.run_settings is not None:
            return
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def prepare(self, workload: Workload) -> dict:
        """Compile by running: torch.compile has no ahead-of-time call; the time is the compiler's own count."""
        if self.run_settings is not None:
            return super().prepare(workload)
        width = workload.prompt_tokens + (1 if workload.kind == "train" else 0)
        inputs = [[1 + (row + column) % 64 for column in range(width)] for row in range(workload.batch)]
        before = compiler_seconds()
        self.rehearse(workload, inputs)
        return {"compile_s": compiler_seconds() - before}

    def rehearse(self, workload: Workload, inputs: list) -> None:
        """Run each of the workload's programs once: two tokens of decoding, a step's gradients without its update."""
        if workload.kind == "train":
            self.train.loss_fn(self.model, self._batch(inputs)).backward()
            self.model.zero_grad(set_to_none=True)
            return
        with self.torch.inference_mode():
            new_tokens = max(workload.new_tokens, 1)
            state = self.generator.prefill(inputs, max_new_tokens=new_tokens, seed=0)
            self.generator.decode(state, min(new_tokens, 2))
        self.synchronize()


def compiler_seconds() -> float:
    """Wall time that torch.compile has spent in this process so far: Dynamo, Inductor, C++ compiler."""
    from torch._dynamo import utils

    return float(utils.calculate_time_spent().get("total_wall_time", 0.0))
