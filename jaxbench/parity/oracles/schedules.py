"""Learning rates as optax and transformers compute them, and peaks as papers print them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import optax
import torch
import transformers

from jaxbench.parity import cases, gates
from jaxbench.training import schedules
from jaxbench.training.schedules import ScheduleConfig

Schedule = Callable[[np.ndarray], np.ndarray]  # learning rates of steps
STEPS, PEAK = 60, 3e-3
FALL = {"cosine": 0.1, "linear": 0.2, "wsd": 0.05}  # final fraction by kind
# Goyal et al. 2017, arXiv:1706.02677, section 5.1: 0.1 for 256 images, 3.2 for 8192. You et al. 2020,
# arXiv:1904.00962, untuned LAMB: 5 / (2**3 * 1000) for 512 sequences, 5 / 1000 for 32768.
PEAKS = {"linear": (0.1, 256, 8192, 3.2), "sqrt": (5 / 8000, 512, 32768, 5 / 1000)}


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """One gate per kind of schedule, each with and without warm-up, and one of the scaled peaks."""
    found = []
    for kind in ("constant", "cosine", "linear", "wsd", "relative"):
        ours, wanted = {}, {}
        for warmup in (0, 7) if kind != "relative" else (0,):
            config = ScheduleConfig(kind=kind, warmup_steps=warmup, final_fraction=FALL.get(kind, 0.1))
            peak = PEAK if kind != "relative" else 1e-2  # the peak built into transformers' Adafactor
            rates = [schedules.learning_rate(config, step, peak=peak, steps=STEPS) for step in range(STEPS)]
            ours |= {f"warm-up {warmup}, step {step}": rate for step, rate in enumerate(rates)}
            theirs = np.asarray(THEIRS[kind](warmup)(np.arange(STEPS)))
            wanted |= {f"warm-up {warmup}, step {step}": rate for step, rate in enumerate(theirs)}
        source = {"wsd": "transformers.get_wsd_schedule", "relative": "transformers.Adafactor"}.get(kind, "optax")
        found.append(gates.oracle(f"learning rates, {kind}", ours, wanted, source=source, tolerance=1e-12))
    scaled = {
        rule: schedules.scaled_peak(peak, rule, batch=batch, base_batch=base)
        for rule, (peak, base, batch, _) in PEAKS.items()
    }
    printed = {rule: row[-1] for rule, row in PEAKS.items()}
    source = "arXiv:1706.02677, section 5.1; arXiv:1904.00962, untuned LAMB"
    return [*found, gates.oracle("peaks of larger batches", scaled, printed, source=source, tolerance=1e-12)]


def _after_warmup(rise: int, rest: Callable) -> Schedule:
    """Schedule that rises linearly over `rise` steps, from 1 / (rise + 1), and continues with `rest`."""
    warmup = optax.linear_schedule(PEAK / (rise + 1), PEAK, rise)
    return optax.join_schedules([warmup, rest], [rise])


def _cosine(rise: int) -> Schedule:
    rest = optax.cosine_decay_schedule(PEAK, STEPS - rise, alpha=FALL["cosine"])
    return _after_warmup(rise, rest)


def _linear(rise: int) -> Schedule:
    return _after_warmup(rise, optax.linear_schedule(PEAK, FALL["linear"] * PEAK, STEPS - rise))


def _wsd(rise: int) -> Schedule:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    schedule = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=0, num_decay_steps=STEPS // 10, num_training_steps=STEPS, decay_type="linear",
        min_lr_ratio=FALL["wsd"],
    )  # fmt: skip
    return _after_warmup(rise, lambda steps: PEAK * np.vectorize(schedule.lr_lambdas[0])(steps + rise))


def _relative(rise: int) -> Schedule:
    optimizer = transformers.Adafactor([torch.zeros(1)], relative_step=True, scale_parameter=False)
    return np.vectorize(lambda step: optimizer._get_lr(optimizer.param_groups[0], {"step": step + 1}))


THEIRS = {
    "constant": lambda rise: _after_warmup(rise, optax.constant_schedule(PEAK)),
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "relative": _relative,
}
