"""A worker of the memory benchmark: the neural memory of one backend.

Started as `python -m jaxbench.memory.study.speed_worker ENGINE THREADS`, engines flax and torch. The protocol is that
of measure/worker.py; titans_worker.py answers the same requests with titans-pytorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbench.measure import worker


class Session:
    """The neural memories of one backend, built and compiled when first asked for."""

    def __init__(self, engine: str, threads: int):
        if engine not in ("flax", "torch"):
            raise ValueError(f"worker: engine={engine!r} is unknown, wanted flax or torch")
        self.engine, self.threads, self.calls = engine, threads, {}

    def start(self) -> dict:
        """Import the backend; the resident set is then the level that memory counts from."""
        if self.engine == "torch":
            import torch

            import torch_ref.memory.neural  # noqa: F401 - counted among the imports

            torch.set_num_threads(self.threads)
            versions = {"torch": torch.__version__}
        else:
            import jax

            import jaxbench.memory.neural  # noqa: F401 - counted among the imports

            jax.devices()
            versions = {"jax": jax.__version__}
        self.level = worker.resident_bytes()
        return {"versions": versions}

    def measure(self, *, network: dict, part: str, batch: int, length: int, repeats: int) -> dict:
        """Wall and CPU seconds of calls, after one that is not counted; part: forward or forward_backward."""
        key = json.dumps([network, part, batch, length])
        if key not in self.calls:
            make = _flax_call if self.engine == "flax" else _torch_call
            self.calls[key] = make(network, part, batch, length)
        call, facts = self.calls[key]
        return worker.timed(call, repeats) | facts

    def memory(self, **case: Any) -> dict:
        """Peak resident set above the level after imports while a case is built and run once more."""
        worker.reset_peak()
        self.measure(**case, repeats=1)
        return {"peak_bytes": max(worker.peak_bytes() - self.level, 0)}


def _shape(network: dict) -> tuple[Any, dict[str, np.ndarray]]:
    from jaxbench.memory import config

    shape = config.NeuralMemoryConfig(**network)
    return shape, config.initial_params(shape, seed=0)


def _stream(batch: int, length: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, length, width)).astype(np.float32)


def _flax_call(network: dict, part: str, batch: int, length: int) -> tuple[Callable[[], None], dict]:
    """A compiled call, and the compiled program's temporary bytes."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxbench.memory import neural

    shape, values = _shape(network)
    # Arrays go to the device as they are: making the first one there would start the compiler, at 60 MB.
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


def _torch_call(network: dict, part: str, batch: int, length: int) -> tuple[Callable[[], None], dict]:
    import torch

    from torch_ref.memory import neural

    shape, values = _shape(network)
    model = neural.build(shape, values)
    x = torch.from_numpy(_stream(batch, length, shape.d_model))

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def forward_backward() -> None:
        model.zero_grad()
        model(x.clone().requires_grad_())[0].sum().backward()

    return {"forward": forward, "forward_backward": forward_backward}[part], {}


if __name__ == "__main__":
    worker.serve(Session)
