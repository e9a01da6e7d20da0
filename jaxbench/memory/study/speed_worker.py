"""A worker of the memory benchmark: the neural memory of one engine, flax, torch or titans (titans-pytorch 0.5.5).

Started as `python -m jaxbench.memory.study.speed_worker ENGINE THREADS`, for titans by the Python of a separate
environment (`make peers`), without jaxbench's dependencies. The protocol is that of measure/worker.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxbench.measure import worker

if TYPE_CHECKING:
    import numpy as np

PACKAGES = {"flax": ("jax",), "torch": ("torch",), "titans": ("torch", "titans-pytorch")}
MODULES = {"flax": "jaxbench.memory.neural", "torch": "torch_ref.memory.neural", "titans": "titans_pytorch"}


class Session:
    """The neural memories of one engine, built and compiled on first use."""

    def __init__(self, engine: str, threads: int):
        if engine not in MODULES:
            raise ValueError(f"worker: engine={engine!r} is unknown, wanted one of {', '.join(MODULES)}")
        self.engine, self.threads, self.calls = engine, threads, {}

    def start(self, *, device: str = "cpu") -> dict:
        """Import the engine for a device; the resident set afterwards is the baseline of memory figures."""
        importlib.import_module(MODULES[self.engine])
        self.device = device
        # No TF32 in any engine: float32 products on a GPU are computed in float32.
        if self.engine == "flax":
            jax = importlib.import_module("jax")
            jax.config.update("jax_default_matmul_precision", "highest")
            jax.devices()
        else:
            torch = importlib.import_module("torch")
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            torch.set_num_threads(self.threads)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES[self.engine]}
        self.level = worker.resident_bytes()
        return {"versions": versions}

    def measure(self, *, network: dict, part: str, batch: int, length: int, repeats: int) -> dict:
        """Wall and CPU seconds of calls, after one warm-up call; part: forward or forward_backward."""
        key = json.dumps([network, part, batch, length])
        if key not in self.calls:
            make = {"flax": _flax_call, "torch": _torch_call, "titans": _titans_call}[self.engine]
            self.calls[key] = make(network, part, batch, length, self.device)
        call, facts = self.calls[key]
        return worker.timed(call, repeats) | facts

    def memory(self, **case: Any) -> dict:
        """Peak while a case is built and run once more: of the device's memory, or on a CPU of the resident set above
        the level after imports.
        """
        worker.reset_peak()
        self.measure(**case, repeats=1)
        if self.device == "cpu":
            return {"peak_bytes": max(worker.peak_bytes() - self.level, 0)}
        if self.engine == "flax":
            return {"peak_bytes": importlib.import_module("jax").devices()[0].memory_stats()["peak_bytes_in_use"]}
        return {"peak_bytes": importlib.import_module("torch").cuda.max_memory_allocated()}


def _shape(network: dict) -> tuple[Any, dict[str, np.ndarray]]:
    from jaxbench.memory import config

    shape = config.NeuralMemoryConfig(**network)
    return shape, config.initial_params(shape, seed=0)


def _stream(batch: int, length: int, width: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(0).standard_normal((batch, length, width)).astype(np.float32)


def _flax_call(network: dict, part: str, batch: int, length: int, device: str) -> tuple[Callable[[], None], dict]:
    """A compiled call, and the compiled program's temporary bytes; environment variables have chosen the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxbench.memory import neural

    shape, values = _shape(network)
    # Arrays are copied to the device: creating the first one there would start the compiler, at 60 MB.
    graph, empty = nnx.split(nnx.eval_shape(lambda: neural.NeuralMemory(shape, dtype="float32")))
    named = {path: values[".".join(map(str, path))].astype(np.float32) for path, _ in nnx.to_flat_state(empty)}
    params = nnx.from_flat_state([(path, nnx.Param(jax.device_put(value))) for path, value in named.items()])
    x = jax.device_put(_stream(batch, length, shape.d_model))

    def forward(params: Any, x: Any) -> Any:
        return nnx.merge(graph, params)(x)[0]

    function = forward
    if part == "forward_backward":
        function = jax.grad(lambda params, x: jnp.sum(forward(params, x)), argnums=(0, 1))
    program = jax.jit(function).lower(params, x).compile()
    facts = {"temp_bytes": program.memory_analysis().temp_size_in_bytes}
    return lambda: jax.block_until_ready(program(params, x)), facts


def _torch_call(network: dict, part: str, batch: int, length: int, device: str) -> tuple[Callable[[], None], dict]:
    import torch

    from torch_ref.memory import neural

    shape, values = _shape(network)
    model, x = neural.build(shape, values), torch.from_numpy(_stream(batch, length, shape.d_model))
    return _passes(model, x, part, device), {}


def _titans_call(network: dict, part: str, batch: int, length: int, device: str) -> tuple[Callable[[], None], dict]:
    """A call of the memory that a NeuralMemoryConfig describes, on a GPU with its Triton scan if that starts.

    Its batch_size is the chunk's, so that gradients are taken at the weights of the chunk's start (Titans, eq. 16).
    """
    import titans_pytorch
    import torch

    def made(**scan: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = titans_pytorch.NeuralMemory(
            dim=network["d_model"], heads=network["num_heads"], dim_head=network["head_dim"],
            chunk_size=network["chunk_size"], batch_size=network["chunk_size"],
            mem_model_norm_add_residual=network["residual_norm"],
            default_model_kwargs={"depth": network["depth"], "expansion_factor": float(network["hidden_factor"])},
            **scan,
        )  # fmt: skip
        return _passes(model, torch.randn(batch, length, network["d_model"]), part, device)

    if device == "cpu":
        return made(), {}
    reason = _why_no_scan(made)
    if not reason:
        return made(use_accelerated_scan=True), {"scan": "triton"}
    gc.collect()  # memory held by the attempt is not the peer's
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return made(), {"scan": f"plain: {reason}"}


def _why_no_scan(made: Callable[..., Callable[[], None]]) -> str:
    """Return why titans-pytorch's Triton scan does not start here, or an empty string."""
    try:
        made(use_accelerated_scan=True)()
    except Exception as error:  # its kernels need a compiler, or lengths that are powers of two
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def _passes(model: Any, x: Any, part: str, device: str) -> Callable[[], None]:
    """Return a call of a PyTorch memory, forward or forward and backward, that waits for its end."""
    import torch

    place = "cuda" if device == "gpu" else device
    model, x = model.to(place), x.to(place)
    wait = torch.cuda.synchronize if device == "gpu" else lambda: None

    def forward() -> None:
        with torch.no_grad():
            model(x)
        wait()

    def forward_backward() -> None:
        model.zero_grad()
        model(x.clone().requires_grad_())[0].sum().backward()
        wait()

    return {"forward": forward, "forward_backward": forward_backward}[part]


if __name__ == "__main__":
    worker.serve(Session)
