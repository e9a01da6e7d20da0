"""Names, colours and number formats of the report (S file)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxbench.bench.arms.arm_table import AGAIN, ARMS
from jaxbench.measure import verdicts
from jaxbench.measure.records import Workload

VERDICT_COLORS = {"faster": "#2c9a5b", "slower": "#d84c4c"} | dict.fromkeys(
    ("undecided", "baseline", "same"), "#8b8f98"
)
METRICS = {
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
    "train_tokens_per_s": "train step",
    "train_mfu": "train step, MFU",
    "train_mfu_causal": "train step, MFU with half the attention",
    "first_token_s": "first token",
    "token_s": "token after the first",
    "load_s": "load",
    "compile_cold_s": "compile, cold",
    "compile_warm_s": "compile, warm",
    "peak_memory_bytes": "peak memory",
    "energy_j_per_token": "energy",
    "temp_bytes": "compiled temp bytes",
    "argument_bytes": "compiled argument bytes",
    "flops": "compiled FLOPs",
}
SIGNS = {"faster": "▲", "slower": "▼", "undecided": "?", "baseline": "=", "same": "="}
VERDICTS = {name: name for name in SIGNS} | {"same": "programs equal to another arm's, not counted"}


def arm(name: str) -> str:
    """Display name of an arm."""
    kind = name.removesuffix(AGAIN)
    return ARMS[kind].label + ", again" * (kind != name) if kind in ARMS else name


def color(name: str) -> str:
    """Colour of an arm."""
    return ARMS[kind].color if (kind := name.removesuffix(AGAIN)) in ARMS else "#8b8f98"


def full(workload: Workload, *, with_kind: bool = True) -> str:
    """Display name of a workload: `decode, float32, batch 8, 64 + 48 tokens`."""
    parts = [workload.kind] if with_kind and workload.kind != "none" else []
    parts += [workload.dtype] if workload.dtype else []
    parts += [f"batch {workload.batch}"] if workload.batch else []
    if workload.prompt_tokens:
        new = f" + {workload.new_tokens}" if workload.new_tokens else ""
        parts.append(f"{workload.prompt_tokens}{new} tokens")
    return ", ".join(parts)


def heading(metric: str, workload: Workload) -> str:
    """Heading of one metric on one workload."""
    name = METRICS.get(metric, metric)
    shown = full(workload, with_kind=name.split()[0] not in (workload.kind, "train"))
    return ": ".join(part for part in (name, shown) if part)


def short(workload: Workload) -> str:
    """Short display name of a workload for the terminal: `float32 b8 64+48`."""
    tokens = f"{workload.prompt_tokens}" + (f"+{workload.new_tokens}" if workload.new_tokens else "")
    parts = (workload.dtype, f"b{workload.batch}" if workload.batch else "", tokens if workload.prompt_tokens else "")
    return " ".join(part for part in parts if part)


def value(quantity: float | None, unit: str) -> str:
    """Format a number with its unit to three significant digits: `68.1 tokens/s`, `1.27 GiB`, `0.64 ms`."""
    if quantity is None or not math.isfinite(quantity):
        return "-"
    if unit == "s":
        return f"{significant(quantity * 1e3)} ms" if abs(quantity) < 1 else f"{significant(quantity)} s"
    if unit == "bytes":
        return scaled(quantity, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if unit == "share":
        return f"{100 * quantity:.1f} %"
    if unit in ("FLOP", "FLOP/s", "bytes/s"):
        short = {"FLOP": "FLOP", "FLOP/s": "FLOP/s", "bytes/s": "B/s"}[unit]
        return scaled(quantity, 1000, tuple(prefix + short for prefix in ("", "k", "M", "G", "T", "P")))
    return f"{significant(quantity)} {unit}".strip()


def significant(quantity: float) -> str:
    """Format to three significant digits, with thousands separators and no exponent from 0.001 up to 1e11."""
    if quantity == 0 or not math.isfinite(quantity):
        return f"{quantity:g}"
    digits = 2 - math.floor(math.log10(abs(quantity)))
    if digits > 5 or digits < -8:
        return f"{quantity:.2e}"
    return f"{round(quantity, digits):,.{max(digits, 0)}f}"


def scaled(quantity: float, base: int, units: tuple[str, ...]) -> str:
    """Format a number in the largest unit that leaves it at least 1."""
    index = 0
    while abs(quantity) >= base and index < len(units) - 1:
        quantity, index = quantity / base, index + 1
    return f"{significant(quantity)} {units[index]}"


def ratio(triple: tuple[float, float, float]) -> str:
    """Format a ratio with its interval, `2.51 [2.40, 2.63]`; an uninformative interval is a dash, `2.51 \u2013`."""
    point, low, high = triple
    if not verdicts.is_informative(low, high):
        return f"{point:.2f} \u2013"
    return f"{point:.2f} [{low:.2f}, {high:.2f}]"


def judged(verdict: str, triple: tuple[float, float, float], decidable: float | None) -> str:
    """Verdict's sign and the ratio: `▲ 2.51 [2.40, 2.63]`; undecided, `? 1.07 [0.96, 1.19] ≥1.31`.

    The last figure is the smallest ratio that these launches would have decided in nine of ten cases.
    """
    least = f" ≥{decidable:.2f}" if decidable is not None and decidable < verdicts.MAX_WIDTH else ""
    return f"{SIGNS[verdict]} {ratio(triple)}{least}"


def percentiles(shares: Sequence[tuple[str, float | None]]) -> str:
    """Seconds by percentile: `p50 14.1 ms, p90 15.0 ms, p99 –`; a dash where there are too few samples for a bound."""
    return ", ".join(f"{name} {value(seconds, 's') if seconds is not None else '–'}" for name, seconds in shares)
