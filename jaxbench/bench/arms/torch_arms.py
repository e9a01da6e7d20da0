"""PyTorch arms: the twin (torch_ref) run eagerly, and the same under torch.compile."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxbench.bench.arms import contract, twin_arm
from jaxbench.measure import inductor
from jaxbench.measure.records import Workload


class TorchBase(contract.Arm):
    """Base of the twin's and Hugging Face's arms: devices, threads, the roofline loops."""

    packages = ("torch", "numpy", "python")

    def start(self) -> str:
        """Import torch and set its threads."""
        import torch

        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")  # no TF32 in any arm (run.fair_settings)
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
        """Do nothing: eager code needs no compilation."""
        return {}

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """Run a workload once."""
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
        """Peak of allocated device memory in bytes since reset_device_memory; None on the CPU."""
        return int(self.torch.cuda.max_memory_allocated()) if self.torch_device == "cuda" else None

    def reset_device_memory(self) -> None:
        """Reset the allocator's peak to the current allocation."""
        if self.torch_device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Times of summing a float32 array of `size` bytes."""
        array = self.torch.ones(size // 4, device=self.torch_device)
        return contract.call_seconds(array.sum, lambda _: self.synchronize(), repeats, device=self.device)

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Times of one matrix product."""
        (m, k, n), place = shape, {"dtype": getattr(self.torch, dtype), "device": self.torch_device}
        left, right = self.torch.randn((m, k), **place), self.torch.randn((k, n), **place)
        return contract.call_seconds(
            lambda: self.torch.mm(left, right), lambda _: self.synchronize(), repeats, device=self.device
        )

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
    """The twin in torch_ref, run eagerly, with PyTorch's own attention kernel and packed products; nothing is padded.

    Tokens per CPU second on one core of an AMD EPYC, default model in float32 (torch 2.13): 266 and 344 with prompts of
    37 and 520 tokens, versus 166 and 138 with lengths padded to powers of two and attention written out (both before
    products were packed: packed.py).
    """

    name = "torch_eager"
    package = functions = "torch_ref"
    attention = "fused"  # scaled_dot_product_attention
    torch_compile = ""  # Compute.torch_compile of its decoder
    is_packed = True  # in inference, where oneDNN has the product
    single_row: str | None = None  # products used for a single row, "packed" or "plain"; None = not tried

    def start(self) -> str:
        """Import the twin's modules."""
        reason = super().start()
        self.packed = importlib.import_module("jaxbench.bench.arms.packed")  # it imports torch
        self._import()
        return reason

    def _build(self, config: Any, params: dict[str, np.ndarray], *, is_trained: bool) -> Any:
        how = {"dtype": self.dtype, "implementation": self.attention}
        how |= {"device": self.torch_device, "torch_compile": self.torch_compile}
        model = self.transformer.build(config, params, **how)
        if is_trained:
            return model
        model.eval().requires_grad_(False)
        params.clear()  # the model has copies; free the file's mapped pages before making more
        self.single_row = None
        if self._packs() or (self.is_packed and self.packed.is_scalar(self.dtype, self.torch_device)):
            self.packed.pack(model)
        return model

    def _packs(self) -> bool:
        return self.is_packed and self.packed.is_possible(self.dtype, self.torch_device)

    def prepare(self, workload: Workload) -> dict:
        """Make the engine of a run's step, or try products for single rows; other eager code needs no compilation."""
        if self.run_settings is None:
            return self._try_single_row(workload)
        return self._make_engine(torch_compile=bool(self.torch_compile), device=self.torch_device)

    def _try_single_row(self, workload: Workload) -> dict:
        """Choose the products of single rows, once per load and before anything is compiled."""
        if workload.kind == "train" or not self._packs():
            return {}
        if self.single_row is None:
            self.single_row = "plain" if self.packed.hold_both_forms(self.model) else "packed"
        return {"single_row": self.single_row}

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after one row, without a cache."""
        row = self.torch.tensor([tokens], device=self.torch_device)
        with self.torch.inference_mode():
            return self.model(row, None)[0, -1].float().cpu().numpy()

    def unload(self) -> None:
        """Drop model, generator and optimiser."""
        self._drop()
        self.packed.release()
        super().unload()

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Seconds of each token after the first."""
        with self.torch.inference_mode():
            return contract.token_seconds(self.generator, inputs, workload, lambda tokens: tokens.cpu().numpy())

    def _batch(self, inputs: list):
        tokens, targets, _ = self._on_device(inputs)
        return self.train.Batch(tokens, targets, None, self.torch.ones_like(tokens, dtype=self.torch.bool))

    def _generate(self, workload: Workload, inputs: list, limit: int | None) -> dict:
        return contract.generate(self.generator, inputs, workload, lambda tokens: tokens.cpu().numpy(), limit=limit)


class PlainArm(EagerArm):
    """EagerArm with the products that torch.matmul chooses: the control that shows the effect of packing.

    Where a narrow type has no product, functional.matmul widens here too; transformers is the control of that.
    """

    name = "torch_plain"
    is_packed = False


class CompiledArm(EagerArm):
    """The twin under torch.compile (Inductor, static shapes): layer by layer on a CPU, the decode step on a GPU.

    All layers share one program per shape (PyTorch's "regional compilation"). CompiledStepArm has the whole decode step
    in one program and is faster, but on 2 cores of an AMD EPYC it compiles for 40 to 46 s per shape (4 to 6 s from the
    cache), where layers take 4 to 10 s (0.2 to 0.5 s). So it is for the long suite (both measured: docs/comparison.md).
    On a GPU the whole step runs as a CUDA graph (mode "reduce-overhead"; not measured).
    """

    name = "torch_compile"
    torch_compile = "layers"

    def start(self) -> str:
        """Import the compiler and check that Inductor can build code here."""
        reason = super().start()
        importlib.import_module("torch._dynamo")  # takes seconds, which are not part of loading a model
        if self.device == "gpu":
            self.torch_compile = "step"
        return reason or inductor.unusable(self.device)

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load as eager does; compilation happens at the first call."""
        self.torch._dynamo.reset()
        self.torch._dynamo.config.recompile_limit = 64  # one program per shape, as the JAX arms have
        super().load(dtype, num_layers=num_layers, train=train)

    def prepare(self, workload: Workload) -> dict:
        """Compile by running: torch.compile has no ahead-of-time call; the time is the compiler's own count."""
        facts = super().prepare(workload)
        if self.run_settings is not None:
            return facts
        width = workload.prompt_tokens + (1 if workload.kind == "train" else 0)
        inputs = [[1 + (row + column) % 64 for column in range(width)] for row in range(workload.batch)]
        before = compiler_seconds()
        self.rehearse(workload, inputs)
        return facts | {"compile_s": compiler_seconds() - before}

    def warm(self, workload: Workload, inputs: list) -> dict:
        """Run a training step; inference programs have already run once, in `prepare`."""
        return super().warm(workload, inputs) if workload.kind == "train" else {}

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


class CompiledStepArm(CompiledArm):
    """The twin with its whole decode step, model and sampling, in one program; prefill and training layer by layer."""

    name = "torch_compile_step"
    torch_compile = "step"

    def start(self) -> str:
        """Start as CompiledArm does, except on a GPU, where CompiledArm is the same."""
        return super().start() or ("torch_compile is the same arm on a GPU" if self.device == "gpu" else "")

    def prepare(self, workload: Workload) -> dict:
        """Compile a decode workload; CompiledArm has the same programs for the others."""
        if workload.kind != "decode":
            return {"skip": "as torch_compile: only its decode step is compiled in another way"}
        return super().prepare(workload)


class Int4Arm(CompiledStepArm):
    """The twin with PyTorch's own 4-bit products, its whole decode step compiled: PyTorch's fastest decoding on a CPU.

    It computes in bfloat16, the only type in which that product is fast, and is listed in the float32 rows next to
    llama.cpp. Prompts are compiled layer by layer, as in CompiledArm. Its codes are those of a Q4_1 file; the tied
    head, which such a file stores wider, has 4 bits too.
    """

    name = "torch_int4"
    is_packed = False

    def start(self) -> str:
        """Start as CompiledStepArm does; the product is a CPU's."""
        return super().start() or ("4-bit weights are measured on CPUs only" if self.device != "cpu" else "")

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Read and quantise the weights, unless this arm skips the rows."""
        self._drop()
        if train is None and dtype == "float32":
            super().load("bfloat16", num_layers=num_layers, train=None)

    def _build(self, config: Any, params: dict[str, np.ndarray], *, is_trained: bool) -> Any:
        model = super()._build(config, params, is_trained=is_trained)
        self.weight_bytes = importlib.import_module("jaxbench.bench.arms.int4").quantize(model)
        return model

    def prepare(self, workload: Workload) -> dict:
        """Compile a prompt or decode workload, or return why this arm skips it."""
        if workload.kind == "train":
            return {"skip": "inference only: PyTorch's 4-bit product has no gradient"}
        if workload.dtype != "float32":
            return {"skip": f"has weights of its own, listed under float32, not {workload.dtype}"}
        return {**CompiledArm.prepare(self, workload), "weight_bytes": self.weight_bytes}


def compiler_seconds() -> float:
    """Wall seconds that torch.compile has spent in this process so far: Dynamo, Inductor, C++ compiler."""
    from torch._dynamo import utils

    return float(utils.calculate_time_spent().get("total_wall_time", 0.0))
