"""A worker of the speed table: one process that holds one arm of a pair for one launch.

Started as `python -m jaxbench.pair.speed_worker ARM THREADS`; the protocol is that of measure/worker.py. It loads the
pair from its file, because models cannot be sent between processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from jaxbench.measure import inductor, verdicts, worker

SAMPLE_S = 1e-3  # minimum length of a sample: shorter calls are repeated
WINDOW = 5  # samples whose median must stop falling before measurement starts
STILL_FALLING = 0.98  # a median below this share of the previous window's is still falling
MIN_SAMPLES = 3
NUM_QUANTILES = 1001  # of the outputs, by which arms are compared with float64


class Session:
    """One arm of one pair."""

    def __init__(self, arm_name: str, threads: int):
        self.arm_name, self.threads = arm_name, threads

    def start(self, *, path: str) -> dict:
        """Import the frameworks and load the pair's file.

        Raises:
          ValueError: the arm is torch_compiled, and torch.compile cannot build code here.
        """
        if self.arm_name == "torch_compiled" and (reason := inductor.unusable("cpu")):
            raise ValueError(reason)
        import jax
        import torch

        from jaxbench.measure import environment
        from jaxbench.pair import pair_file, public_types

        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        jax.devices()
        self.pair = public_types.checked(pair_file.load(path))
        return {"seconds": time.perf_counter() - start, "versions": environment.versions()}

    def open(self, *, weights: str, dtype: str, trained: dict, is_training: bool) -> dict:
        """Build the arm with its weights in one dtype."""
        import numpy as np

        from jaxbench.pair import proof, speed_arms

        with np.load(weights) as file:
            sides = [{name.partition("/")[2]: file[name] for name in file if name.startswith(s)} for s in ("t/", "j/")]
        names = (frozenset(trained[side]) for side in ("torch", "jax"))
        given = proof.Weights(*sides, *names, is_training)
        self.arm = speed_arms.arm(self.arm_name, self.pair, given, dtype=dtype)
        return {}

    def prepare(self, *, part: str, limit_s: float) -> dict:
        """Time the first two calls, which compile, then call until calls get no faster or the time is up.

        The second call compiles too where an optimiser creates its state in the first.
        """
        timed = self.arm.timed(part)
        self.call = timed.call
        start = time.perf_counter()
        result = timed.call()
        first_s = time.perf_counter() - start
        facts = {"loss": timed.loss(result)}
        if part == "forward":
            facts["quantiles"] = quantiles([self.arm.as_numpy(y) for y in result])
        start = time.perf_counter()
        timed.call()
        first_s += time.perf_counter() - start
        begun, samples = time.perf_counter(), []
        self.repeats = 1
        samples.append(self._sample())
        self.repeats = max(1, round(SAMPLE_S / samples[0]))
        while not is_settled(samples) and time.perf_counter() - begun < limit_s:
            samples.append(self._sample())
        return {"first_s": first_s, "warmup": len(samples), "is_settled": is_settled(samples), "detail": facts}

    def measure(self, *, seconds: float) -> dict:
        """Sample until the time is up; return the median seconds per call and the number of samples."""
        begun, samples = time.perf_counter(), []
        while len(samples) < MIN_SAMPLES or time.perf_counter() - begun < seconds:
            samples.append(self._sample())
        return {"seconds": verdicts.median(samples), "samples": len(samples)}

    def memory(self) -> dict:
        """Return the peak memory of one call above what is resident between calls, in bytes."""
        worker.release_memory()
        worker.reset_peak()
        before = worker.resident_bytes()
        self.call()
        return {"bytes": max(worker.peak_bytes() - before, 0)}

    def _sample(self) -> float:
        start = time.perf_counter()
        for _ in itertools.repeat(None, self.repeats):
            self.call()
        return (time.perf_counter() - start) / self.repeats


def is_settled(samples: Sequence[float]) -> bool:
    """True once the median of the last WINDOW samples no longer falls below that of the WINDOW before."""
    if len(samples) < 2 * WINDOW:
        return False
    before, last = samples[-2 * WINDOW : -WINDOW], samples[-WINDOW:]
    return verdicts.median(last) >= STILL_FALLING * verdicts.median(before)


def quantiles(outputs: Sequence[Any]) -> list[float]:
    """Return evenly spaced quantiles of all outputs' values, which are the same for every layout."""
    import numpy as np

    parts = [part for y in outputs for part in ((y.real, y.imag) if np.iscomplexobj(y) else (y,))]
    values = np.sort(np.concatenate([np.asarray(part, np.float64).ravel() for part in parts]))
    places = np.linspace(0, len(values) - 1, min(len(values), NUM_QUANTILES)).round().astype(int)
    return values[places].tolist()


if __name__ == "__main__":
    worker.serve(Session)
