"""PyTorch arms: the plain twin (torch_ref) run eagerly, and the same under torch.compile."""

from __future__ import annotations

import os
import shutil
import time

from jaxbench.bench import arms
from jaxbench.bench.records import Workload


class TorchBase(arms.Arm):
    """What the twin and Hugging Face share: devices, threads, the AdamW step, the roofline loops."""

    packages = ("torch", "numpy", "python")

    def start(self) -> str:
        """Import torch and set its threads."""
        import torch

        torch.set_num_threads(self.threads)
        if self.device == "gpu" and not torch.cuda.is_available():
            return "this PyTorch build sees no GPU"
        self.torch_device = "cuda" if self.device == "gpu" else "cpu"
        self.model = self.optimizer = None
        return ""

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.torch_device == "cuda":
            import torch

            torch.cuda.synchronize()

    def prepare(self, workload: Workload) -> dict:
        """Eager code has nothing to compile."""
        return {}

    def measure(self, workload: Workload, inputs: list) -> dict:
        """Run one workload."""
        import torch

        if workload.kind == "train":
            return self._step(inputs)
        with torch.inference_mode():
            return self._generate(workload, inputs)

    def unload(self) -> None:
        """Drop the model."""
        self.model = self.optimizer = None
        if self.torch_device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def device_memory(self) -> int | None:
        """Return the peak of allocated device memory."""
        if self.torch_device != "cuda":
            return None
        import torch

        return int(torch.cuda.max_memory_allocated())

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Sum a float32 array."""
        import torch

        array = torch.ones(size // 4, device=self.torch_device)
        return arms.timed(lambda: float(array.sum()), repeats)

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Multiply two matrices."""
        import torch

        m, k, n = shape
        left = torch.ones((m, k), dtype=getattr(torch, dtype), device=self.torch_device)
        right = torch.ones((k, n), dtype=getattr(torch, dtype), device=self.torch_device)

        def run() -> None:
            torch.mm(left, right)
            self.synchronize()

        return arms.timed(run, repeats)

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

    def _finish_loading(self, train: dict | None) -> None:
        if train is None:
            self.model.eval().requires_grad_(False)
        else:
            import torch

            self.model.train().requires_grad_(True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train["learning_rate"], **arms.ADAMW)
        self.synchronize()

    def _step(self, inputs: list) -> dict:
        import torch

        tokens, wanted, positions = (torch.from_numpy(a.copy()).to(self.torch_device) for a in arms.targets(inputs))
        start = time.perf_counter()
        loss = self._loss(tokens, wanted, positions)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        self.synchronize()
        return {"step_s": time.perf_counter() - start, "loss": value}

    def _loss(self, inputs, wanted, positions):
        raise NotImplementedError(f"{self.name}: loss")

    def _generate(self, workload: Workload, inputs: list) -> dict:
        raise NotImplementedError(f"{self.name}: generate {workload.label()}")
