"""titans-pytorch 0.5.5 as a worker; runs in an environment of its own (`make peers`), where jaxbench is not installed.

    .venvs/titans/bin/python -P jaxbench/memory/study/titans_worker.py

Requests and answers are those of speed_worker.py; so this file imports nothing of jaxbench. `batch_size` is its
`chunk_size`, so that gradients are taken at the weights of the chunk's start, as the paper does (eq. 16).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback


class Session:
    """titans-pytorch's neural memories, built when first asked for."""

    def start(self) -> dict:
        """Import the package on one core; the resident set is then the level that memory counts from."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        import importlib.metadata

        import titans_pytorch  # noqa: F401 - counted among the imports
        import torch

        torch.set_num_threads(1)
        self.calls, self.level = {}, _status_bytes("VmRSS")
        return {"versions": {name: importlib.metadata.version(name) for name in ("torch", "titans-pytorch")}}

    def measure(self, *, network: dict, part: str, batch: int, length: int, repeats: int) -> dict:
        """Return wall and CPU seconds of calls, after one that is not counted; part: forward or forward_backward."""
        key = json.dumps([network, part, batch, length])
        if key not in self.calls:
            self.calls[key] = _call(network, part, batch, length)
        call = self.calls[key]
        call()
        wall, cpu = [], []
        for _ in range(repeats):
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        return {"seconds": wall, "cpu_seconds": cpu}

    def memory(self, **case) -> dict:
        """Return the peak resident set above the level after imports while a case is built and run once more."""
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass  # the peak then also covers the imports: an upper bound
        self.measure(**case, repeats=1)
        return {"peak_bytes": max(_status_bytes("VmHWM") - self.level, 0)}


def _call(network: dict, part: str, batch: int, length: int):
    """Return a call of the memory that a NeuralMemoryConfig describes."""
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


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


_OPERATIONS = ("start", "measure", "memory")


def main() -> None:
    """Answer requests until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # no library can break the protocol
    session = Session()
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("operation")
        try:
            if operation not in _OPERATIONS:
                raise ValueError(f"worker: unknown operation {operation!r}, wanted one of {', '.join(_OPERATIONS)}")
            answer = getattr(session, operation)(**request)
        except Exception as error:  # noqa: BLE001 - the boundary of the process: every failure becomes an answer
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
