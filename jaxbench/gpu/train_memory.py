"""Memory of a Flax training step on a device, for one_arm.py: cost of each way of saving it, and the largest batch.

Bytes are the compiler's for the whole step, so that a form that does not fit gives a record too.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.gpu import rates
from jaxbench.measure.records import Record, Workload
from jaxbench.text.dataset import Batch
from jaxbench.training.train_config import TrainConfig

LEFT = 0.95  # share of the device's memory that a step may take: fragmentation takes some


def ladder(
    settings: TrainConfig, config: TransformerConfig, batch: Batch, keep: Callable[[Record], None], *,
    steps: int, device: str, limit: int | None,
) -> None:  # fmt: skip
    """Keep the bytes of a step, and its rate if it fits, in each form of memory_savings.SAVINGS.

    limit: bytes; None = the device's.

    Raises:
      GateFailed: a form could not be measured; the others are kept.
    """
    from jaxbench.training import memory_savings
    from jaxbench.training.engine import Engine

    params, limit = initial.initial_params(config, seed=settings.seed), limit or limit_bytes()
    lost: list[str] = []
    for saving in memory_savings.SAVINGS:
        absent = Record(metric="device_peak_bytes", arm=saving[0], workload=sizes(settings), unit="bytes")
        with rates.apart(lost, saving[0], keep, absent):
            (row,) = memory_savings.measure(
                settings, config, lambda run: Engine(run, config, params), [batch] * (steps + 1),
                kernel="blocked" if device == "cpu" else "fused", limit_bytes=limit, savings=(saving,),
            )  # fmt: skip
            figures = {
                "device_peak_bytes": (float(row.step_bytes), "bytes"),
                "train_tokens_per_s": (row.tokens_per_s, "tokens/s"),
                "train_mfu": (row.mfu, "ratio"), "train_mfu_causal": (row.mfu_causal, "ratio"),
            }  # fmt: skip
            detail = {"fits": row.fits, "limit_bytes": limit}
            for metric, (value, unit) in figures.items():
                if value is not None:
                    own = {"metric": metric, "value": value, "unit": unit, "detail": detail}
                    keep(absent.model_copy(update=own))
    rates.check_all(lost, len(memory_savings.SAVINGS))


def largest(settings: TrainConfig, config: TransformerConfig, *, limit: int | None) -> tuple[TrainConfig, Record]:
    """Find the largest batch whose compiled step and evaluation fit; return the run with it, and its record.

    limit: bytes; None = the device's.

    Raises:
      ValueError: not even the smallest batch fits.
    """
    from jaxbench.training import batch_size

    found = batch_size.find_optimal_batch_size(
        lambda rows: batch_size.run_bytes(settings.model_copy(update={"batch_size": rows}), config),
        limit_bytes=limit or limit_bytes(),
        multiple=settings.step.accumulation,
    )
    run = settings.model_copy(update={"batch_size": found.batch_size})
    detail = {"bytes": found.run_bytes, "limit_bytes": found.limit_bytes}
    detail |= {"tried": {str(rows): needed for rows, needed in sorted(found.tried.items())}}
    return run, Record(
        metric="largest_batch", value=float(found.batch_size), unit="rows", arm="flax", workload=sizes(run),
        detail=detail,
    )  # fmt: skip


def sizes(settings: TrainConfig) -> Workload:
    """Return the workload of a step."""
    rows, length = settings.batch_size, settings.data.seq_len
    return Workload(kind="train", dtype=settings.step.precision, batch=rows, prompt_tokens=length)


def limit_bytes() -> int:
    """Return the bytes that a step may take on the first device."""
    from jaxbench.training import batch_size

    return int(LEFT * batch_size.device_bytes())
