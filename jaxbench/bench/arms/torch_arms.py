"""PyTorch arms: the plain twin (torch_ref) run eagerly, and the same under torch.compile."""

from __future__ import annotations

import importlib
import os
import shutil
import time

import numpy as np

from jaxbench.bench.arms import contract, run_step
from jaxbench.measure import worker
from jaxbench.measure.records import Workload


class TorchBase(contract.Arm):
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

    def warm(self, workload: Workload, inputs: list) -> dict:
        """Run the workload once, a few tokens of decoding."""
        import torch

        if workload.kind == "train":
            return self._step(inputs)
        with torch.inference_mode():
            return self._generate(workload, inputs, limit=contract.WARM_TOKENS)

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
        return worker.timed(lambda: float(array.sum()), repeats)["seconds"]

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Multiply two matrices."""
        import torch

        m, k, n = shape
        left = torch.ones((m, k), dtype=getattr(torch, dtype), device=self.torch_device)
        right = torch.ones((k, n), dtype=getattr(torch, dtype), device=self.torch_device)

        def run() -> None:
            torch.mm(left, right)
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

    def _finish_loading(self, train: dict | None) -> None:
        if train is None:
            self.model.eval().requires_grad_(False)
        else:
            import torch

            self.model.train().requires_grad_(True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train["learning_rate"], **contract.ADAMW)
        self.synchronize()

    def _step(self, inputs: list) -> dict:
        import torch

        tokens, wanted, positions = (torch.from_numpy(a.copy()).to(self.torch_device) for a in contract.targets(inputs))
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

    def _generate(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        raise NotImplementedError(f"{self.name}: generate {workload.label()}")


class EagerArm(TorchBase):
    """The twin in torch_ref, run eagerly."""

    name = "torch_eager"
    is_compiled = False

    def start(self) -> str:
        """Import the twin's modules."""
        reason = super().start()
        self.transformer = importlib.import_module("torch_ref.transformer")
        self.sample = importlib.import_module("torch_ref.sample")
        self.train = importlib.import_module("torch_ref.train")
        self.update = importlib.import_module("torch_ref.training.optimizer_step")
        self.generator = self.state = self.run_step = None
        return reason

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Read the checkpoint and build the twin; the optimiser too where asked."""
        from jaxbench.pretrained import weights
        from jaxbench.training import precision

        self.dtype = dtype
        checkpoint = weights.load_checkpoint(self.checkpoint)
        if train is not None and train["form"] == "run":
            how = {"torch_compile": self.is_compiled, "device": self.torch_device}
            sizes = train | {"num_layers": num_layers}
            self.run_step = run_step.RunStep("torch_ref", checkpoint, dtype, sizes, **how)
            return
        config, params = contract.shallow(checkpoint.config, checkpoint.params, num_layers)
        self.model = self.transformer.build(config, params, dtype=dtype).to(self.torch_device)
        if train is None:
            self.model.eval().requires_grad_(False)
            self._make_generator()
        else:
            self.learning_rate, policy = train["learning_rate"], precision.uniform(dtype)
            self.state = self.update.init_state(self.model, params, contract.PLAIN_STEP, policy=policy)
        self.synchronize()

    def prepare(self, workload: Workload) -> dict:
        """Make the engine of a run's step; other eager code has nothing to compile."""
        return {} if self.run_step is None else self.run_step.prepare()

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Run the model on one row, without a cache."""
        import torch

        row = torch.tensor([tokens], device=self.torch_device)
        with torch.inference_mode():
            return self.model(row, torch.arange(row.shape[1], device=row.device)[None])[0, -1].float().cpu().numpy()

    def unload(self) -> None:
        """Drop model, generator and optimiser."""
        self.generator = self.state = self.run_step = None
        super().unload()

    def _batch(self, inputs: list):
        import torch

        tokens, wanted, positions = (torch.from_numpy(a.copy()).to(self.torch_device) for a in contract.targets(inputs))
        return self.train.Batch(tokens, wanted, positions, torch.ones_like(tokens, dtype=torch.bool))

    def _make_generator(self) -> None:
        self.generator = self.sample.Generator(self.model, eos_id=None, sampling=self.sample.SamplingParams())

    def _generate(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        return contract.generate(self.generator, inputs, workload, lambda tokens: tokens.cpu().numpy(), limit=limit)

    def _step(self, inputs: list) -> dict:
        if self.run_step is not None:
            return self.run_step.measure(inputs, self.synchronize)
        batch = self._batch(inputs)
        start = time.perf_counter()
        how = {"step_config": contract.PLAIN_STEP, "is_guarded": False}
        self.state, metrics = self.update.train_step(self.state, batch, self.learning_rate, **how)
        value = float(metrics.loss)
        self.synchronize()
        return {"step_s": time.perf_counter() - start, "loss": value}


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
        import torch

        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64  # one program a shape, as the JAX arms have
        super().load(dtype, num_layers=num_layers, train=train)
        if self.run_step is not None:
            return
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def prepare(self, workload: Workload) -> dict:
        """Compile by running: torch.compile has no ahead-of-time call; the time is the compiler's own count."""
        if self.run_step is not None:
            return self.run_step.prepare()
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
        import torch

        with torch.inference_mode():
            new_tokens = max(workload.new_tokens, 1)
            state = self.generator.prefill(inputs, max_new_tokens=new_tokens, seed=0)
            self.generator.decode(state, min(new_tokens, 2))
        self.synchronize()


def compiler_seconds() -> float:
    """Return the wall time that torch.compile has spent in this process so far: Dynamo, Inductor, C++ compiler."""
    from torch._dynamo import utils

    return float(utils.calculate_time_spent().get("total_wall_time", 0.0))
