"""Interface of the comparison's arms: what each backend does for one request of the worker (see bench/worker.py).

An arm loads the checkpoint, prepares a workload (compiling if the backend compiles), and measures it once per request.
It returns raw seconds and tokens; the parent computes rates by one rule for every arm. Heavy packages are imported by
`start`, never by this file, so that import time and memory are attributed to the arm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxbench import initial
from jaxbench.measure import worker
from jaxbench.measure.records import Workload
from jaxbench.training.step_config import OptimizerConfig, StepConfig

WARM_TOKENS = 6  # generated in a warm-up
# AdamW of every arm's train step, set explicitly because the libraries' defaults differ (Loshchilov and Hutter 2019).
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# The twins' "plain" step: AdamW on every parameter and nothing else, as the transformers arm implements it.
PLAIN_STEP = StepConfig(
    clip_norm=None,
    optimizer=OptimizerConfig(
        b1=ADAMW["betas"][0], b2=ADAMW["betas"][1], eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"], decay="all"
    ),
)


class Arm:
    """Base class of all arms; a subclass implements the parts that need its library."""

    name = "arm"
    packages: tuple[str, ...] = ("numpy",)  # packages whose versions go into its records
    holds_model = True  # False: child processes hold it, so that the arm's own load time and memory mean nothing

    def __init__(self, *, device: str, threads: int, checkpoint: str, programs: str = "", file: str = ""):
        self.device, self.threads, self.checkpoint = device, threads, checkpoint
        self.file = file  # the original model: a GGUF file, or the checkpoint's folder
        self.programs = programs  # folder where compiled programs are kept for later launches; empty = not kept
        self.dtype = ""

    def start(self) -> str:
        """Import the libraries; return why this arm cannot run here, or an empty string."""
        raise NotImplementedError(f"{self.name}: start")

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load the checkpoint in `dtype`, only the first `num_layers` layers if given, with AdamW if `train` is.

        train["form"] selects the step: "plain" (PLAIN_STEP, all in dtype) or "run" (twin_arm.py).
        """
        raise NotImplementedError(f"{self.name}: load {dtype}")

    def prepare(self, workload: Workload) -> dict:
        """Compile what the workload needs and return the facts that exist.

        Facts are compile_s, temp_bytes, flops, weight_bytes; {"skip": reason} says that this arm has no such workload.
        """
        raise NotImplementedError(f"{self.name}: prepare {workload.label()}")

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """Run the workload once: return {first_s, rest_s, tokens} of a generation, {step_s, loss} of the train step.

        An arm leaves out what it cannot measure (first_s of a decode workload, tokens).

        limit: tokens after which a generation stops, in the same programs; None = workload.new_tokens.
        """
        raise NotImplementedError(f"{self.name}: measure {workload.label()}")

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Seconds of each token after the first, each read on the host before the next is made; empty if unknown."""
        raise NotImplementedError(f"{self.name}: token_seconds {workload.label()}")

    def warm(self, workload: Workload, inputs: list) -> dict:
        """Run the workload's programs once, for a few tokens of decoding: touches memory and starts threads."""
        return self.measure(workload, inputs, limit=WARM_TOKENS)

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after these."""
        raise NotImplementedError(f"{self.name}: logits after {len(tokens)} tokens")

    def unload(self) -> None:
        """Drop the weights and compiled programs."""
        raise NotImplementedError(f"{self.name}: unload")

    def device_memory(self) -> int | None:
        """Peak bytes on the accelerator since reset_device_memory; None where unknown, as on the CPU."""
        return None

    def reset_device_memory(self) -> None:
        """Reset device_memory's peak, before a stage loads its weights."""

    def read_seconds(self, size: int, repeats: int) -> list[float]:
        """Times of summing a float32 array of `size` bytes, in seconds."""
        raise NotImplementedError(f"{self.name}: read {size}")

    def gemm_seconds(self, shape: tuple[int, int, int], dtype: str, repeats: int) -> list[float]:
        """Times of one (M, K) x (K, N) product, in seconds."""
        raise NotImplementedError(f"{self.name}: gemm {shape}")

    def profile(self, workload: Workload, inputs: list, folder: str) -> str:
        """Write a trace of one run of the workload into `folder` and return its path."""
        raise NotImplementedError(f"{self.name}: profile {workload.label()}")


def shallow(config, params: dict[str, np.ndarray], num_layers: int | None):
    """Return configuration and parameters of the model's first `num_layers` layers; None = all."""
    if num_layers is None or num_layers >= config.num_layers:
        return config, params
    config = config.model_copy(update={"num_layers": num_layers})
    return config, {name: params[name] for name in initial.parameter_shapes(config)}


def generate(
    generator: Any, inputs: list, workload: Workload, to_host: Callable[[Any], np.ndarray], *, limit: int | None = None
) -> dict:
    """Run a twin's Generator once, timing the first token and the rest separately, both until they are on the host."""
    new_tokens = max(workload.new_tokens, 1)
    start = time.perf_counter()
    state = generator.prefill(inputs, max_new_tokens=new_tokens, seed=0)
    tokens = to_host(state.tokens)
    first = time.perf_counter()
    if new_tokens > 1:
        state = generator.decode(state, new_tokens if limit is None else min(limit, new_tokens))
        tokens = to_host(state.tokens)
    last = time.perf_counter()
    width = workload.prompt_tokens
    generated = tokens[: workload.batch, width : width + new_tokens]
    return {"first_s": first - start, "rest_s": last - first, "tokens": generated.tolist()}


def call_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, *, device: str) -> list[float]:
    """Times of a roofline call; wait: for what the last call returned.

    On an accelerator a call takes 1 ms, of which starting it is a part: a time is the mean of ten, one after another.
    """
    count = 1 if device == "cpu" else 10

    def run() -> None:
        for _ in range(count):
            found = call()
        wait(found)

    return [seconds / count for seconds in worker.timed(run, repeats)["seconds"]]


def token_seconds(
    generator: Any, inputs: list, workload: Workload, to_host: Callable[[Any], np.ndarray]
) -> list[float]:
    """Return the seconds of each token after the first in one run of a twin's Generator, one decode call per token."""
    state = generator.prefill(inputs, max_new_tokens=workload.new_tokens, seed=0)
    to_host(state.tokens)
    seconds = []
    for count in range(2, workload.new_tokens + 1):
        start = time.perf_counter()
        state = generator.decode(state, count)
        to_host(state.tokens)
        seconds.append(time.perf_counter() - start)
    return seconds


def targets(rows: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], ...]:
    """Return inputs, targets and positions of the train step, from rows one token longer than the sequence."""
    tokens = np.asarray(rows, dtype=np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1] - 1, dtype=np.int32), tokens[:, 1:].shape)
    return tokens[:, :-1], tokens[:, 1:], np.ascontiguousarray(positions)
