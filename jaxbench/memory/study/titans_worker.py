"""titans-pytorch 0.5.5 as a worker of the speed benchmark, in an environment of its own (`make peers`).

Started as `.venvs/titans/bin/python -m jaxbench.memory.study.titans_worker titans 1`; answers the requests of
speed_worker.py. Of jaxbench it imports only what needs no package. `batch_size` is its `chunk_size`, so that gradients
are taken at the weights of the chunk's start, as the paper does (eq. 16).
"""

from __future__ import annotations

import json

from jaxbench.measure import worker


class Session:
    """titans-pytorch's neural memories, built when first asked for."""

    def __init__(self, _: str, threads: int):
        self.threads, self.calls = threads, {}

    def start(self) -> dict:
        """Import the package; the resident set is then the level that memory counts from."""
        import importlib.metadata

        import titans_pytorch  # noqa: F401 - counted among the imports
        import torch

        torch.set_num_threads(self.threads)
        self.level = worker.resident_bytes()
        return {"versions": {name: importlib.metadata.version(name) for name in ("torch", "titans-pytorch")}}

    def measure(self, *, network: dict, part: str, batch: int, length: int, repeats: int) -> dict:
        """Wall and CPU seconds of calls, after one that is not counted; part: forward or forward_backward."""
        key = json.dumps([network, part, batch, length])
        if key not in self.calls:
            self.calls[key] = _call(network, part, batch, length)
        return worker.timed(self.calls[key], repeats)

    def memory(self, **case) -> dict:
        """Peak resident set above the level after imports while a case is built and run once more."""
        worker.reset_peak()
        self.measure(**case, repeats=1)
        return {"peak_bytes": max(worker.peak_bytes() - self.level, 0)}


def _call(network: dict, part: str, batch: int, length: int):
    """A call of the memory that a NeuralMemoryConfig describes."""
    import torch
    from titans_pytorch import NeuralMemory

    torch.manual_seed(0)
    model = NeuralMemory(
        dim=network["d_model"],
        heads=network["num_heads"],
        dim_head=network["head_dim"],
        chunk_size=network["chunk_size"],
        batch_size=network["chunk_size"],
        mem_model_norm_add_residual=network["residual_norm"],
        default_model_kwargs={"depth": network["depth"], "expansion_factor": float(network["hidden_factor"])},
    )
    x = torch.randn(batch, length, network["d_model"])

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def forward_backward() -> None:
        model.zero_grad()
        model(x.clone().requires_grad_())[0].sum().backward()

    return {"forward": forward, "forward_backward": forward_backward}[part]


if __name__ == "__main__":
    worker.serve(Session)
