"""Measure memory savings: bytes, tokens/s and MFU of a training step, one way of saving after another (S file).

Every way is compiled for the same batch. The compiler reports the memory that its step needs, so a way that does not
fit is a row like the others; those that fit take some steps, which give their rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxbench.config import TransformerConfig
from jaxbench.training import observe
from jaxbench.training.step_config import OffloadConfig, RematConfig
from jaxbench.training.train_config import TrainConfig

BLOCK = RematConfig(policy="block")
HOST = RematConfig(policy="offload", names=("input",))
# name, whether attention is the kernel that stores no scores, rematerialisation, host offload; least saving first
SAVINGS = (
    ("naive", False, RematConfig(), OffloadConfig()),
    ("flash", True, RematConfig(), OffloadConfig()),
    ("flash, remat", True, BLOCK, OffloadConfig()),
    ("flash, remat, optimiser offloaded", True, BLOCK, OffloadConfig(optimizer=True)),
    ("flash, remat, all offloaded", True, HOST, OffloadConfig(optimizer=True, gradients=True)),
)


class Row(NamedTuple):
    """One way of saving memory, measured."""

    name: str
    step_bytes: int  # of device memory: state, batch, temporaries
    fits: bool
    tokens_per_s: float | None  # None: it does not fit
    mfu: float | None  # attention counted in full
    mfu_causal: float | None  # attention counted as half


def measure(
    settings: TrainConfig,
    model: TransformerConfig,
    make_engine: Callable[[TrainConfig], Any],
    batches: Sequence[Any],
    *,
    kernel: str,
    limit_bytes: int,
    savings: Sequence[tuple] = SAVINGS,
) -> Iterator[Row]:
    """Yield the bytes and, if they fit, the rate of a training step with each of `savings`.

    Args:
      settings: the run; its own implementation, step.remat and step.offload are replaced.
      make_engine: returns the Engine of a configuration, its step compiled.
      batches: the first warms up, the others are timed.
      kernel: the attention that stores no scores: fused, or blocked where there is no kernel.
      limit_bytes: of device memory; a step that needs more is not run.

    Raises:
      ValueError: fewer than two batches.
    """
    if len(batches) < 2:
        raise ValueError(f"memory ladder: {len(batches)} batches, wanted one to warm up and one to time at least")
    tokens = settings.batch_size * settings.data.seq_len
    for name, is_flash, remat, offload in savings:
        step = settings.step.model_copy(update={"remat": remat, "offload": offload})
        implementation = kernel if is_flash else "dense"
        engine = make_engine(settings.model_copy(update={"implementation": implementation, "step": step}))
        step_bytes = engine.memory()["step"]
        if step_bytes > limit_bytes:
            del engine  # before the next one's state is made
            yield Row(name, step_bytes, fits=False, tokens_per_s=None, mfu=None, mfu_causal=None)
            continue
        engine.fetch(engine.step(batches[0], settings.learning_rate))
        started = time.perf_counter()
        metrics = [engine.step(batch, settings.learning_rate) for batch in batches[1:]]
        engine.fetch(metrics[-1])
        rate = len(metrics) * tokens / (time.perf_counter() - started)
        peak = observe.peak_of(engine, settings.logging.peak_tflops)
        shares = observe.utilisation(
            model, settings.data.seq_len, tokens_per_s=rate, peak=peak, is_trained=settings.step.optimizer.is_trained
        )
        yield Row(name, step_bytes, True, rate, **shares)
        del engine, metrics


def table(rows: Sequence[Row], *, limit_bytes: int) -> str:
    """Text table of the rows, one line each."""
    lines = [f"{'':34} {'MiB a step':>11} {'tokens/s':>10} {'MFU':>7} {'causal':>7}"]
    for row in rows:
        line = f"{row.name:34} {row.step_bytes / 2**20:11,.1f} "
        if row.fits:
            line += f"{row.tokens_per_s:10,.0f} {100 * row.mfu:5.1f} % {100 * row.mfu_causal:5.1f} %"
        else:
            line += f"does not fit in {limit_bytes / 2**20:,.1f} MiB"
        lines.append(line)
    return "\n".join(lines)
