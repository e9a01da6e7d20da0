"""The training run's backend in PyTorch: model, optimiser, step and evaluation. Twin: jaxbench/training/engine.py.

One device; eager, or loss and gradient compiled (step.torch_compile). The run (jaxbench/training/trainer.py) handles
only numpy arrays and names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from jaxbench import philox
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.measure import worker
from jaxbench.training import observe, precision
from jaxbench.training.step_config import TWIN_OPTIMIZERS
from jaxbench.training.train_config import TrainConfig
from torch_ref import functional, prng, remat, train, transformer
from torch_ref.training import optimizer_step

GEMM_REPEATS = 4  # of the matrix product that measures the device's rate if no table lists it


class Engine:
    """One model in training."""

    def __init__(
        self,
        settings: TrainConfig,
        config: TransformerConfig,
        params: Mapping[str, np.ndarray],
        *,
        extension: Extension = Extension(),
        device: str = "cpu",
    ):
        """Place the parameters, and compile if asked; settings.scan_layers affects the JAX twin only.

        Raises:
          ValueError: a mesh, optimiser or rematerialisation policy that this twin does not have.
        """
        if (parallel := settings.parallel) is not None:
            raise ValueError(f"engine: torch_ref trains on one device, got parallel={parallel}; use --backend=flax")
        self.step_config = step_config = settings.step
        if step_config.optimizer.kind not in TWIN_OPTIMIZERS:
            raise ValueError(
                f"engine: step.optimizer.kind={step_config.optimizer.kind} is not in torch_ref, which has "
                f"{', '.join(TWIN_OPTIMIZERS)}; use --backend=flax"
            )
        if step_config.remat.policy not in remat.POLICIES:
            raise ValueError(
                f"engine: step.remat.policy={step_config.remat.policy} is not in torch_ref, which has "
                f"{', '.join(remat.POLICIES)}; use --backend=flax"
            )
        if step_config.kernels != "auto":
            raise ValueError(
                f"engine: step.kernels={step_config.kernels} is JAX's; PyTorch has its own, leave it at auto"
            )
        self.policy, self.device = precision.POLICIES[step_config.precision], device
        compute = settings.compute(self.policy.parameter)._asdict()
        model = transformer.build(config, params, make_layer=extension.make_layer, device=device, **compute)
        self.state = optimizer_step.init_state(model, params, step_config)
        self.dropout_key = prng.key_from_seed(settings.seed).to(device) if settings.has_dropout else None
        self.extension = extension
        self.rows, self.num_devices = (0, settings.batch_size), 1
        self._is_masked = settings.data.document_mask
        self._loss = _CompiledLoss() if step_config.torch_compile else train.loss_fn
        self.compile_seconds = self._compile(settings) if step_config.torch_compile else 0.0

    def step(self, batch: Any, learning_rate: float) -> optimizer_step.Metrics:
        """Run one step."""
        self.state, metrics = optimizer_step.train_step(
            self.state,
            self._batch(batch),
            learning_rate,
            self.dropout_key,
            step_config=self.step_config,
            loss_fn=self._loss,
        )
        return metrics

    def fetch(self, metrics: optimizer_step.Metrics) -> optimizer_step.Metrics:
        """Wait for a step and return its metrics as Python numbers."""
        return optimizer_step.Metrics(*(value.item() for value in metrics))

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Return the sum of a batch's losses in nats, and its number of targets."""
        total, count = optimizer_step.eval_step(
            self.state.params, self._batch(batch), graph=None, step_config=self.step_config
        )
        return float(total), int(count)

    def watched(self, batch: Any) -> dict[str, float]:
        """Figures of what a workload's layers hold after a whole batch, by name."""
        if self.extension.watch is None:
            return {}
        found = self.extension.watch(self.state.params, self._batch(batch), graph=None, step_config=self.step_config)
        return self.extension.scalars(pytree.tree_map(lambda x: x.cpu().numpy(), found))

    def arrays(self) -> dict[str, Any]:
        """Arrays of the whole training state by name, for a checkpoint."""
        state, tensors = self.state, {}
        for name, parameter in state.params.named_parameters():
            tensors[f"params.{name}"] = parameter
            for kind, value in state.moments.state[parameter].items():
                tensors[f"moments.{kind}.{name}"] = value
        scaler = state.scaler.state_dict()
        counters = {"step": state.step, "skipped": int(state.skipped), "good_steps": scaler.get("_growth_tracker", 0)}
        arrays = {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}
        arrays |= {name: np.array(value, np.int32) for name, value in counters.items()}
        return arrays | {"scale": np.array(scaler.get("scale", 1.0)), "is_halted": np.array(bool(state.is_halted))}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load a checkpoint's state."""
        state = self.state
        with torch.no_grad():
            for name, parameter in state.params.named_parameters():
                parameter.copy_(torch.tensor(arrays[f"params.{name}"]))
                for kind, value in state.moments.state[parameter].items():
                    value.copy_(torch.tensor(arrays[f"moments.{kind}.{name}"]))
        if state.scaler.is_enabled():
            values = {"scale": float(arrays["scale"]), "_growth_tracker": int(arrays["good_steps"])}
            state.scaler.load_state_dict(state.scaler.state_dict() | values)
        state.step = int(arrays["step"])
        state.skipped.fill_(int(arrays["skipped"]))
        state.is_halted.fill_(bool(arrays["is_halted"]))

    def params(self) -> dict[str, np.ndarray]:
        """Parameters by dotted name, in the policy's parameter type."""
        return {name: p.detach().cpu().numpy().copy() for name, p in self.state.params.named_parameters()}

    def memory(self) -> dict[str, int]:
        """Device memory in bytes: `live` now, and `step`, the peak so far; 0 on a CPU."""
        if self.device == "cpu":
            return {"live": 0, "step": 0}
        return {"live": torch.cuda.memory_allocated(), "step": torch.cuda.max_memory_allocated()}

    def device_kind(self) -> str:
        """Name of the device, such as cpu or NVIDIA H200."""
        return "cpu" if self.device == "cpu" else torch.cuda.get_device_name()

    def matmul_rate(self) -> float:
        """Measure the rate of a square matrix product in the compute type, FLOP/s."""
        size, dtype = observe.gemm_size(self.device), getattr(torch, self.policy.compute)
        # Not ones: their products draw less power, so that a GPU clocks higher.
        x = torch.sin(torch.arange(size**2, dtype=torch.float32, device=self.device)).reshape(size, size).to(dtype)
        times = worker.timed(lambda: (x @ x)[0, 0].item(), GEMM_REPEATS)
        return 2 * size**3 / min(times["seconds"])

    def product_type(self) -> str:
        """Type of the operands of products: the compute type, but tf32 where a GPU rounds float32 to that."""
        is_exact = torch.get_float32_matmul_precision() == "highest"
        is_rounded = self.policy.compute == "float32" and self.device != "cpu" and not is_exact
        return "tf32" if is_rounded else self.policy.compute

    def diagnose(self, batch: Any, step: int) -> str:
        """Name the first non-finite value of a step: a parameter, a module's output, or a gradient.

        Modules are watched by hooks, in the order in which they finish.
        """
        model, count, found = self.state.params, self.step_config.accumulation, []
        broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if broken:
            return f"parameter {broken[0]} is not finite (and {len(broken) - 1} more)"

        def watch(name: str) -> Any:
            def hook(module: Any, args: Any, result: Any) -> None:
                value = result[0] if isinstance(result, tuple) else result
                if not found and not bool(torch.isfinite(value).all()):
                    found.append(f"the output of module {name} is the first that is not finite")

            return hook

        modules = [(path, module) for path, module in model.named_modules() if type(module) is not torch.nn.ModuleList]
        handles = [module.register_forward_hook(watch(path or "model")) for path, module in modules]
        arrays = self._batch(batch)
        for k in range(count):
            micro = train.Batch(*(None if x is None else x[k::count] for x in arrays))
            key = self.dropout_key
            dropout = None if key is None else functional.DropoutStream(key, step * count + k)
            with torch.no_grad(), optimizer_step.cast_to_compute(model, self.policy):
                loss = train.loss_fn(model, micro, dropout=dropout)
            if not found and not bool(torch.isfinite(loss)):
                found.append("every module is finite, the loss over model's logits is not")
        for handle in handles:
            handle.remove()
        return found[0] if found else "every module's output is finite: a gradient overflowed in the backward pass"

    def start_profile(self, folder: str) -> None:
        """Begin a trace, for chrome://tracing or ui.perfetto.dev."""
        self._profile = (torch.profiler.profile(), folder)
        self._profile[0].start()

    def stop_profile(self) -> None:
        """End the trace and write it."""
        profiler, folder = self._profile
        profiler.stop()
        Path(folder).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(Path(folder) / "trace.json"))

    def _compile(self, settings: TrainConfig) -> float:
        """Compile by computing one gradient, since torch.compile has no other way; return the seconds it took."""
        started, model = time.perf_counter(), self.state.params
        shape = (settings.batch_size // settings.step.accumulation, settings.data.seq_len)
        ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        ones = torch.ones_like(ids, dtype=torch.bool)
        # Four separate tensors of ids: one tensor passed twice would compile to another program.
        packed = (ids.clone(), ids.clone()) if self._is_masked else (None, None)
        batch = train.Batch(ids, ids.clone(), packed[0], ones, packed[1])
        dropout = None if self.dropout_key is None else functional.DropoutStream(self.dropout_key, 0)
        with optimizer_step.cast_to_compute(model, self.policy):
            loss = self._loss(model, batch, dropout=dropout)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def _batch(self, batch: Any) -> train.Batch:
        """Batch of tensors on the device."""
        arrays = train.Batch(*batch)
        if not self._is_masked:
            arrays = arrays._replace(positions=None, segments=None)
        return train.Batch(*(None if x is None else self._placed(x) for x in arrays))

    def _placed(self, array: np.ndarray) -> Tensor:
        """Tensor on the device; a GPU copies it while the host goes on, which takes memory that is not paged."""
        value = torch.as_tensor(array)
        return value if self.device == "cpu" else value.pin_memory().to(self.device, non_blocking=True)


class _CompiledLoss:
    """train.loss_fn compiled by torch.compile, for one batch shape; the optimiser and evaluation stay eager."""

    def __init__(self):
        torch.compiler.assume_constant_result(philox.site_id)  # a checksum, which the compiler cannot trace
        self._program = torch.compile(train.loss_fn, dynamic=False, fullgraph=True)

    def __call__(self, model: Any, batch: train.Batch, *, dropout: functional.DropoutStream | None = None) -> Tensor:
        """Loss in nats per token; dropout's step is passed as a tensor: a number would recompile at each step."""
        if dropout is not None:
            dropout = dropout._replace(step=torch.tensor(dropout.step, device=dropout.key.device))
        return self._program(model, batch, dropout=dropout)
