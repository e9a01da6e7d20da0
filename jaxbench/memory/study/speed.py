"""Speed and peak memory of the neural memory versus titans-pytorch, in one run (S file).

Every arm runs in its own process (measure/process.py), one at a time on one core, and their order rotates from launch
to launch. A launch gives one ratio per case, of median CPU seconds and of median wall seconds; intervals are
t-intervals over launches. Peak memory is measured in separate processes with the system's malloc settings: the resident
set above the level after the imports, while the case is built (from the compile cache) and run. On a GPU only wall time
is meaningful, and memory is the device's. Medians of each launch are also written to results.jsonl as records.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import outputs, process_environment
from jaxbench.config import Base
from jaxbench.measure import environment, process, verdicts
from jaxbench.measure.process import Worker, WorkerError
from jaxbench.measure.records import RESULTS_NAME, Record, RecordFile, Workload
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.study.fields import Length, Several

WORKER = "jaxbench.memory.study.speed_worker"  # the module run by an arm's process
PARTS = ("forward", "forward_backward")
CASE = ("network", "arm", "read", "part")
BARS = {"forward": 4.0, "forward_backward": 2.0, "memory": 4.0}
TIMEOUT_S = 600.0  # per request


class Network(Base):
    """A neural memory that all arms build."""

    name: str = Field(min_length=1)
    shape: NeuralMemoryConfig
    reads: Several[Literal["token", "chunk"]] = ("token", "chunk")  # jaxbench's read-out; titans-pytorch: chunk


class Speed(Base):
    """Settings of the measurement: configs/memory/speed.yaml."""

    networks: Several[Network]
    engines: Several[Literal["flax", "torch"]] = ("flax", "torch")
    batch: int = Field(default=2, ge=1)
    length: Length = 1024
    launches: int = Field(default=6, ge=2)
    repeats: int = Field(default=5, ge=1)  # calls per case and launch
    memory_lengths: Several[Length] = (1024, 4096)  # at which peak memory is taken
    # forward and backward, batch 1, first network
    slope_lengths: Several[Length] = (1024, 2048, 4096, 8192, 16384)
    slope_repeats: int = Field(default=3, ge=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Speed:
        if len(self.slope_lengths) < 2:
            raise ValueError(f"speed: slope_lengths={list(self.slope_lengths)} give no slope, wanted at least 2")
        names = [network.name for network in self.networks]
        for index, network in enumerate(self.networks):
            if network.name in names[:index]:
                raise ValueError(f"speed: two networks are named {network.name}; results are told apart by their names")
            if not network.shape.depth:
                raise ValueError(f"speed: network {network.name} has depth=0, wanted one that learns: 1 to 4")
        return self


def run(settings: Speed, workdir: str | Path, *, device: str = "cpu") -> dict[str, Any]:
    """Measure, write summary.json into the workdir and return it; a missing peer is named, and its ratios are left out.

    device: cpu or gpu.

    Raises:
      ValueError: a part of jaxbench itself failed.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    arms, missing, rows, memory = [*settings.engines], {}, [], []
    try:
        _python("titans")
        arms.append("titans")
    except ValueError as error:
        missing["titans"] = str(error)
    file, versions = RecordFile(workdir / RESULTS_NAME), {}
    file.set_aside()
    for launch_index in range(settings.launches):
        for arm in process.turn(list(arms), launch_index):
            with _leaving_out(arm, arms, missing):
                found = _measured(settings, arm, launch_index, workdir, versions, device)
                file.append(*(_record(settings, row, device, versions[arm]) for row in found))
                rows += found
        print(f"    launch {launch_index + 1} of {settings.launches}", file=sys.stderr, flush=True)
    for arm in list(arms):
        for network, read in _cases(settings, arm):
            for length in settings.memory_lengths:
                with _leaving_out(arm, arms, missing):
                    row = _peak(settings.batch, length, arm, network, read, workdir, device)
                    file.append(_peak_record(settings, row, device))
                    memory.append(row)
    summary = {
        "about": environment.describe(threads=1) | {"missing": missing, "arms": versions, "device": device},
        "settings": settings.model_dump(mode="json"),
        "rates": _rates(settings, rows),
        "ratios": _ratios(rows),
        "memory": memory,
        "memory_ratios": _memory_ratios(memory),
        "slope": _slope(settings, workdir, device),
    }
    outputs.set_aside(workdir / "summary.json")
    outputs.write_json(workdir / "summary.json", summary)
    return summary


@contextlib.contextmanager
def _leaving_out(arm: str, arms: list[str], missing: dict[str, str]) -> Iterator[None]:
    """If the peer fails, record the reason and stop measuring it; a failure of jaxbench's own arms is raised."""
    try:
        yield
    except ValueError as error:
        if arm != "titans":
            raise
        missing[arm] = str(error)[:500]
        if arm in arms:
            arms.remove(arm)


def _cases(settings: Speed, arm: str) -> list[tuple[Network, str]]:
    return [
        (network, read) for network in settings.networks for read in (("chunk",) if arm == "titans" else network.reads)
    ]


def _request(network: Network, read: str) -> dict:
    return network.shape.model_dump(mode="json") | {"read": read}


def _python(arm: str) -> str | Path:
    """The interpreter that has an arm's package: this one if it is installed alongside jaxbench, as on a lent GPU.

    Raises:
      ValueError: no interpreter has it.
    """
    if arm == "titans" and importlib.util.find_spec("titans_pytorch") is None:
        return process.peer_python(arm)
    return sys.executable


def _worker(arm: str, workdir: Path, device: str, *, is_malloc_tuned: bool = True) -> Worker:
    library, log = "XLA" if arm == "flax" else "PyTorch", workdir / "logs" / f"{arm}.log"
    threads = 1 if device == "cpu" else environment.usable_cores()  # with a GPU they only compile and wait
    variables = process.environment(device, threads=threads, library=library)
    if not is_malloc_tuned:
        tuned = process_environment.malloc_settings(variables)
        variables = {name: value for name, value in variables.items() if name not in tuned}
    how = {"environment": variables, "log": log, "threads": threads, "timeout_s": TIMEOUT_S, "python": _python(arm)}
    return Worker(arm, WORKER, **how)


def _ask(worker: Worker, operation: str, **arguments: Any) -> dict:
    try:
        return worker.request(operation, **arguments)
    except WorkerError as error:
        raise ValueError(f"speed: {worker.name} could not do {operation} {arguments}: {error}") from error


def _measured(
    settings: Speed, arm: str, launch_index: int, workdir: Path, versions: dict, device: str
) -> list[dict]:  # fmt: skip
    """Records of one arm in one launch."""
    rows = []
    size = {"batch": settings.batch, "length": settings.length, "repeats": settings.repeats}
    with _worker(arm, workdir, device) as worker:
        versions[arm] = _ask(worker, "start", device=device)["versions"]
        for network, read in _cases(settings, arm):
            for part in PARTS:
                case = {"arm": arm, "network": network.name, "read": read, "part": part, "launch": launch_index}
                rows.append(case | _ask(worker, "measure", network=_request(network, read), part=part, **size))
    return rows


def _record(settings: Speed, row: dict, device: str, versions: dict[str, str]) -> Record:
    """Record of one case of one launch: tokens per second of wall time, at the median of its calls."""
    tokens = settings.batch * settings.length
    workload = Workload(kind="inference", dtype="float32", batch=settings.batch, prompt_tokens=settings.length)
    return Record(
        metric="memory_tokens_per_s", value=tokens / verdicts.median(row["seconds"]), unit="tokens/s",
        samples=tuple(tokens / each for each in row["seconds"]), launch=1 + row["launch"], device=device,
        commit=environment.commit(),
        arm=" ".join(row[name] for name in ("arm", "network", "read", "part")), workload=workload, versions=versions,
        detail={name: row[name] for name in ("scan", "temp_bytes") if name in row},
    )  # fmt: skip


def _peak_record(settings: Speed, row: dict, device: str) -> Record:
    """Record of the peak memory of one case."""
    workload = Workload(kind="train", dtype="float32", batch=settings.batch, prompt_tokens=row["length"])
    arm = " ".join(row[name] for name in ("arm", "network", "read"))
    metric = "peak_memory_bytes" if device == "cpu" else "device_peak_bytes"
    return Record(
        metric=metric, value=float(row["peak_bytes"]), unit="bytes", arm=arm, workload=workload, device=device
    )  # fmt: skip


def _peak(batch: int, length: int, arm: str, network: Network, read: str, workdir: Path, device: str) -> dict:
    """Peak memory in bytes of forward and backward in a fresh process."""
    case = {"network": _request(network, read), "part": "forward_backward", "batch": batch, "length": length}
    with _worker(arm, workdir, device, is_malloc_tuned=False) as worker:
        _ask(worker, "start", device=device)
        peak_bytes = _ask(worker, "memory", **case)["peak_bytes"]
    return {"arm": arm, "network": network.name, "read": read, "length": length, "peak_bytes": peak_bytes}


def _slope(settings: Speed, workdir: Path, device: str) -> dict:
    """Times of forward and backward by length, and the exponent of the power law through them."""
    points = []
    network = _request(settings.networks[0], settings.networks[0].reads[0])
    with _worker("flax", workdir, device) as worker:
        _ask(worker, "start", device=device)
        for length in settings.slope_lengths:
            size = {"batch": 1, "length": length, "repeats": settings.slope_repeats}
            times = _ask(worker, "measure", network=network, part="forward_backward", **size)
            point = {"length": length, "seconds": min(times["seconds"]), "temp_bytes": times["temp_bytes"]}
            points.append(point | {"cpu_seconds": verdicts.median(times["cpu_seconds"])})
    return {"points": points, "exponent": exponent(points, _clock(device))}


def _clock(device: str) -> str:
    """Name of the times to compare: CPU seconds, but wall seconds for a GPU, for which the CPU mostly waits."""
    return "cpu_seconds" if device == "cpu" else "seconds"


def exponent(points: list[dict], field: str) -> float:
    """Exponent b of the power law field ~ length^b, by least squares of logarithms: 1 = linear, 2 = quadratic."""
    lengths, values = ([math.log(point[name]) for point in points] for name in ("length", field))
    return float(np.polyfit(lengths, values, 1)[0])


def _by_case(rows: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Group records by case: network, arm, read and part."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return [(dict(zip(CASE, key, strict=True)), same) for key, same in cases.items()]


def _rates(settings: Speed, rows: list[dict]) -> list[dict]:
    """Tokens per second of each case: medians over launches of each launch's median."""
    rates, tokens = [], settings.batch * settings.length
    for case, same in _by_case(rows):
        row = dict(case)
        for name, field in (("tokens_per_s", "seconds"), ("tokens_per_cpu_s", "cpu_seconds")):
            row[name] = tokens / verdicts.median([verdicts.median(r[field]) for r in same])
        rates.append(row | {"scan": same[0]["scan"]} if "scan" in same[0] else row)
    return rates


def _ratios(rows: list[dict]) -> list[dict]:
    """Speed-ups of jaxbench's arms over titans-pytorch, with 95 % t-intervals over launches."""
    peers = {(r["network"], r["part"], r["launch"]): r for r in rows if r["arm"] == "titans"}
    ratios = []
    beside = [r for r in rows if r["arm"] != "titans" and (r["network"], r["part"], r["launch"]) in peers]
    for case, same in _by_case(beside):
        if len(same) < 2:  # the peer failed in all launches but one
            continue
        row = case | {"bar": BARS[case["part"]]}
        for name, field in (("wall", "seconds"), ("cpu", "cpu_seconds")):
            pairs = [(r[field], peers[r["network"], r["part"], r["launch"]][field]) for r in same]
            logs = [verdicts.log_ratio(mine, peer, higher_is_better=False) for mine, peer in pairs]
            row[name] = list(verdicts.t_interval(logs).ratio())
        ratios.append(row)
    return ratios


def _memory_ratios(memory: list[dict]) -> list[dict]:
    peers = {(row["network"], row["length"]): row["peak_bytes"] for row in memory if row["arm"] == "titans"}
    return [
        row | {"ratio": peers[row["network"], row["length"]] / row["peak_bytes"], "bar": BARS["memory"]}
        for row in memory
        if row["arm"] != "titans" and (row["network"], row["length"]) in peers
    ]


def tables(summary: dict[str, Any]) -> list[Any]:
    """Rich tables and lines of a summary."""
    from rich.table import Table

    names = ("network", "arm", "read", "part", "tokens/s", "tokens/cpu-s", "x by the clock", "x by CPU", "wanted")
    device = summary["about"]["device"]
    clock, deciding = _clock(device), "cpu" if device == "cpu" else "wall"
    where = "one thread" if device == "cpu" else f"on a {device}"
    table = Table(*names, title=f"Neural memory, {where}", title_justify="left")
    ratios = {tuple(row[name] for name in CASE): row for row in summary["ratios"]}
    for row in summary["rates"]:
        key = tuple(row[name] for name in CASE)
        cells = [*key, f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_cpu_s']:,.0f}"]
        if ratio := ratios.get(key):
            cells += ["{:.2f} [{:.2f}, {:.2f}]".format(*ratio[name]) for name in ("wall", "cpu")]
            cells.append(f"{ratio['bar']:g} {'reached' if ratio[deciding][1] >= ratio['bar'] else 'MISSED'}")
        table.add_row(*cells)
    memory = Table("network", "tokens", "arm", "read", "peak MiB", "1 / x", title="Peak memory, forward and backward")
    names = ("network", "length", "arm", "read")
    shares = {tuple(row[name] for name in names): f"{row['ratio']:.1f}" for row in summary["memory_ratios"]}
    for row in sorted(summary["memory"], key=lambda row: (row["network"], row["length"])):
        key = tuple(row[name] for name in names)
        memory.add_row(*map(str, key), f"{row['peak_bytes'] / 2**20:,.0f}", shares.get(key, ""))
    slope = Table("tokens", clock.replace("cpu_", "CPU "), "temp MiB", title="Forward and backward by length, batch 1")
    for point in summary["slope"]["points"]:
        megabytes = f"{point['temp_bytes'] / 2**20:.1f}"
        slope.add_row(f"{point['length']:,}", f"{point[clock]:.3f}", megabytes)
    shown = [table, memory, slope, f"time grows as length to the power {summary['slope']['exponent']:.3f}"]
    plain = {row["scan"] for row in summary["rates"] if row.get("scan", "triton") != "triton"}
    shown += [f"titans-pytorch ran without its Triton scan, {reason}" for reason in sorted(plain)]
    return shown + [f"{name} was left out: {reason}" for name, reason in summary["about"]["missing"].items()]
