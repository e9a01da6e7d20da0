"""The machine's limits: read bandwidth and matmul rate, measured in the same run as the arms (S file).

The workers themselves measure both rates, with their arm's array library. The better of XLA and PyTorch is used for
all arms, so that a share of the roofline favours neither. A share compares the work per second that the model needs
(analytic FLOPs, masked keys partly included, or the least bytes read; flops.py) with that rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxbench.config import TransformerConfig
from jaxbench.measure import flops
from jaxbench.measure.records import Workload


class Rates(NamedTuple):
    """Best rates of one launch."""

    read_bytes_per_s: float  # 0 where not measured
    gemm_flops_per_s: Mapping[str, float]  # dtype -> rate


def rate(work: float, seconds: Sequence[float]) -> float:
    """Return the work per second (bytes read, FLOPs of a product) of the fastest of several runs.

    Raises:
      ValueError: there is no run, or one took no time.
    """
    fastest = min(seconds, default=0.0)
    if fastest <= 0:
        raise ValueError(f"roofline: times must be positive, got {list(seconds)}")
    return work / fastest


def share(
    config: TransformerConfig,
    workload: Workload,
    tokens_per_s: float,
    rates: Rates,
    *,
    weight_bytes: int | None = None,
) -> float | None:
    """Return the share of the machine's rate that a workload reached; None if the rate was not measured.

    Prefill and the train step are compared with the matmul rate, decode with the read bandwidth. weight_bytes: bytes of
    weights that a decode step reads, where they are not of the workload's type.
    """
    if workload.kind == "decode":
        if not rates.read_bytes_per_s:
            return None
        length = workload.prompt_tokens + workload.new_tokens // 2
        cost = flops.decode_cost(
            config, batch=workload.batch, cache_length=length, dtype=workload.dtype, weight_bytes=weight_bytes
        )
        return cost.bytes * (tokens_per_s / workload.batch) / rates.read_bytes_per_s
    peak, length = rates.gemm_flops_per_s.get(workload.dtype, 0.0), workload.prompt_tokens
    if not peak or workload.kind not in ("prefill", "train"):
        return None
    if workload.kind == "prefill":
        cost = flops.prefill_cost(config, batch=workload.batch, prompt_tokens=length, dtype=workload.dtype)
    else:
        cost = flops.train_cost(config, batch=workload.batch, seq_len=length, dtype=workload.dtype)
    return cost.flops * tokens_per_s / (workload.batch * length) / peak
