"""Learning rates by step, computed on the host in float64 so that every backend gets the same number (S file)."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from jaxbench.config import Base


class ScheduleConfig(Base):
    """How the learning rate rises and falls over a run.

    constant; cosine (Loshchilov and Hutter 2017, arXiv:1608.03983); linear; wsd: warm-up, stable, linear decay over the
    last decay_steps (Hu et al. 2024, arXiv:2404.06395); relative: min(peak, 1 / sqrt(step)), Adafactor's relative step
    (Shazeer and Stern 2018, arXiv:1804.04235, section 8).
    """

    kind: Literal["constant", "cosine", "linear", "wsd", "relative"] = "cosine"
    warmup_steps: int = pydantic.Field(default=0, ge=0)  # steps of linear rise; step 0 gets peak / (warmup + 1)
    decay_steps: int | None = pydantic.Field(default=None, ge=1)  # wsd: steps of the decay; others: all after warm-up
    final_fraction: float = pydantic.Field(default=0.1, ge=0, le=1)  # of the peak, at the end and beyond

    @pydantic.model_validator(mode="after")
    def _check_decay(self) -> ScheduleConfig:
        defaults = {name: ScheduleConfig.model_fields[name].default for name in ("decay_steps", "final_fraction")}
        given = [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        if self.kind in ("constant", "relative") and given:
            raise ValueError(
                f"schedule: kind={self.kind} has no decay, so {', '.join(given)} does nothing; leave it out, or use "
                "cosine, linear or wsd"
            )
        return self


def learning_rate(schedule: ScheduleConfig, step: int, *, peak: float, steps: int) -> float:
    """Return the learning rate of a step; steps count from 0.

    Args:
      step: 0 <= step.
      peak: the highest rate, > 0.
      steps: length of the run.

    Raises:
      ValueError: a negative step, or warm-up and decay longer than the run.
    """
    warmup = schedule.warmup_steps
    fall = schedule.decay_steps or max(steps - warmup, 1)
    if schedule.kind == "wsd" and schedule.decay_steps is None:
        fall = max(steps // 10, 1)  # a tenth of the run, as in the paper's figure 6
    needed = warmup + (fall if schedule.kind == "wsd" or schedule.decay_steps else 0)
    if step < 0 or needed > steps:
        raise ValueError(
            f"schedule: step={step}, warmup_steps={warmup} and a decay over {fall} do not fit in steps={steps}"
        )
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "relative":
        return min(peak, 1.0 / math.sqrt(step + 1))
    start = steps - fall if schedule.kind == "wsd" else warmup
    done = min(max((step - start) / fall, 0.0), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1.0 - done
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * share)


def scaled_peak(peak: float, rule: str, *, batch: int, base_batch: int | None) -> float:
    """Scale a peak learning rate to an effective batch: by batch / base_batch (linear), its root (sqrt), or not (none).

    Sources: Goyal et al. 2017, arXiv:1706.02677 (linear, SGD); Malladi et al. 2022, arXiv:2205.10287 (root, Adam).

    Raises:
      ValueError: an unknown rule, or a rule without base_batch.
    """
    exponents = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
    if rule not in exponents:
        raise ValueError(f"schedule: scaling {rule!r} is not one of {', '.join(exponents)}")
    if rule != "none" and not base_batch:
        raise ValueError(
            f"schedule: learning_rate_scaling={rule} with base_batch={base_batch}; wanted the rows, 1 or more, that "
            "the learning rate is for"
        )
    return peak * (batch / base_batch) ** exponents[rule] if rule != "none" else peak
