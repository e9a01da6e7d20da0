"""The memory ladder: one training step under one way of saving memory after another (S file).

Every rung is compiled for the same batch. What its step needs comes from the compiler, so a rung that does not fit is a
row like the others; those that fit take some steps, which gives their rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxbench import observe
from jaxbench.config import TransformerConfig
from jaxbench.step_config import OffloadConfig, RematConfig
from jaxbench.train_config import TrainConfig

BLOCK = RematConfig(policy="block")
HOST = RematConfig(policy="offload", names=("input",))
# name, is attention the kernel that holds no scores, what is computed again, what lies in the host's memory
RUNGS = (
    ("naive", False, RematConfig(), OffloadConfig()),
    ("flash", True, RematConfig(), OffloadConfig()),
    ("flash, remat", True, BLOCK, OffloadConfig()),
    ("flash, remat, optimiser offloaded", True, BLOCK, OffloadConfig(optimizer=True)),
    ("flash, remat, all offloaded", True, HOST, OffloadConfig(optimizer=True, gradients=True)),
)


class Row(NamedTuple):
    """One rung."""

    name: str
    step_bytes: int  # of device memory: state, batch, temporaries
    fits: bool
    tokens_per_s: float | None  # None: it does not fit
    mfu: float | None  # attention counted whole
    mfu_causal: float | None  # attention counted by half


def rungs(settings: TrainConfig, kernel: str) -> Iterator[tuple[str, TrainConfig]]:
    """Yield each rung's name and the run's configuration on it; kernel is the attention without scores."""
    for name, is_flash, remat, offload in RUNGS:
        step = settings.step.model_copy(update={"remat": remat, "offload": offload})
        yield name, settings.model_copy(update={"implementation": kernel if is_flash else "dense", "step": step})


def climb(
    settings: TrainConfig,
    model: TransformerConfig,
    make_engine: Callable[[TrainConfig], Any],
    batches: Sequence[Any],
    *,
    kernel: str,
    limit_bytes: int,
) -> Iterator[Row]:
    """Yield the rows, the rung that saves least first.

    Args:
      settings: the run; its own implementation, step.remat and step.offload do not matter.
      model: its decoder.
      make_engine: returns the Engine of a configuration, its step compiled.
      batches: the first warms up, the others are timed.
      kernel: the attention without scores: fused, or blocked where there is no kernel.
      limit_bytes: of device memory.

    Raises:
      ValueError: fewer than two batches.
    """
    if len(batches) < 2:
        raise ValueError(f"memory ladder: {len(batches)} batches, wanted one to warm up and one to time at least")
    tokens = settings.batch_size * settings.data.seq_len
    for name, changed in rungs(settings, kernel):
        engine = make_engine(changed)
        needed = engine.memory()["step"]
        if needed > limit_bytes:
            yield Row(name, needed, False, None, None, None)
            continue
        engine.fetch(engine.step(batches[0], settings.learning_rate))
        started = time.perf_counter()
        taken = [engine.step(batch, settings.learning_rate) for batch in batches[1:]]
        engine.fetch(taken[-1])
        rate = len(taken) * tokens / (time.perf_counter() - started)
        peak = observe.peak_of(engine, settings.logging.peak_tflops)
        work = [observe.flops_per_token(model, settings.data.seq_len, is_causal=causal) for causal in (False, True)]
        yield Row(name, needed, True, rate, *(rate * flops / peak for flops in work))
        del engine, taken  # before the next rung's state is made


def table(rows: Sequence[Row], *, limit_bytes: int) -> str:
    """Return the rows as text."""
    lines = [f"{'':34} {'MiB a step':>11} {'tokens/s':>10} {'MFU':>7} {'causal':>7}"]
    for row in rows:
        line = f"{row.name:34} {row.step_bytes / 2**20:11,.1f} "
        if row.fits:
            line += f"{row.tokens_per_s:10,.0f} {100 * row.mfu:5.1f} % {100 * row.mfu_causal:5.1f} %"
        else:
            line += f"does not fit in {limit_bytes / 2**20:,.1f} MiB"
        lines.append(line)
    return "\n".join(lines)
