"""The comparison from start to report: plan, proof, launches, TPU compile, report (S file).

Each part appends to `results.jsonl` as it ends. An interrupt keeps what is there; `resume` skips finished launches
and parts. The budget is kept by starting no launch that would pass it, judged by the longest launch so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from jaxbench.bench import environment, launch, parts, plan, records, summary
from jaxbench.bench.records import Record, RecordFile
from jaxbench.bench.suite import Suite

RUN_STEP = (
    "The train step is that of experiments/train.py: float32 weights and moments, products in the named type (PyTorch: "
    "autocast), AdamW, clipping at norm 1. MFU is 6 N + 12 L (heads * head_dim) T FLOPs a token, and the same with "
    "half of the second term, over a data sheet's rate or, without one, the faster matrix product of the launch. "
    "Compile time is the wall time of building the step; PyTorch's includes one gradient."
)
REPORT_RESERVE_S = 15  # kept free of the budget for the report


def compare(
    suite: Suite,
    *,
    device: str,
    workdir: Path,
    resume: bool = False,
    profile: bool = False,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Run a suite and return all records of its configuration; everything is also in `workdir`.

    Raises:
      ValueError: bad input, before anything is measured.
      OSError: results cannot be written; what was written before is kept.
    """
    started = time.monotonic()
    work = plan.make_plan(suite, device=device, workdir=workdir)
    file = open_results(work, resume=resume)
    facts = environment.describe(threads=work.threads)
    settings = launch.worker_environment(device, cache=workdir / "compile_cache", threads=work.threads)
    facts["settings"] = environment.fair_settings(threads=work.threads, environment=settings)
    if suite.train.enabled and suite.train.form == "run":
        facts["settings"].append(RUN_STEP)
    records.write_json(workdir / "environment.json", facts)
    resolved = {"config_id": work.config_id, "device": device, "suite": suite.model_dump(mode="json")}
    records.write_json(workdir / "suite.json", resolved)
    parts.parity(work, file, say)
    parts.tpu(work, file, say)
    run_launches(work, file, started=started, say=say)
    if profile:
        parts.profile(work, file, say)
    found = [record for record in file.read() if record.config_id == work.config_id]
    say(f"{sum(r.metric == records.LAUNCH_DONE for r in found)} launches in {time.monotonic() - started:.0f} s")
    return found


def open_results(work: plan.Plan, *, resume: bool) -> RecordFile:
    """Return the results file; a fresh run moves an earlier file aside, it is never deleted."""
    file = RecordFile(work.workdir / records.RESULTS_NAME)
    if resume or not file.path.exists():
        return file
    number = 1
    while (aside := file.path.with_name(f"results.{number}.jsonl")).exists():
        number += 1
    file.path.rename(aside)
    return file


def run_launches(work: plan.Plan, file: RecordFile, *, started: float, say: Callable[[str], None]) -> None:
    """Run the launches that are not finished yet, as far as the budget reaches; the first always runs."""
    rounds = work.suite.rounds
    done = file.finished_launches(work.config_id)
    missing = [number for number in range(1, rounds.launches + 1) if number not in done]
    if len(missing) < rounds.launches:
        say(f"{rounds.launches - len(missing)} of {rounds.launches} launches are already in {file.path.name}")
    expected = 0.0
    for number in missing:
        left = rounds.budget_s - (time.monotonic() - started) - REPORT_RESERVE_S
        if expected and left < expected:
            reason = f"the budget of {rounds.budget_s:.0f} s ends before launch {number} would; raise rounds.budget_s"
            say(reason)
            file.append(work.record("budget", status="skipped", reason=reason, launch=number))
            return
        begun, name = time.monotonic(), f"launch {number}/{rounds.launches}"
        limit_s = left / (rounds.launches - number + 1)
        single = launch.Launch(work, number, file, lambda text, name=name: say(f"{name} {text}"), limit_s=limit_s)
        single.run()
        took = time.monotonic() - begun
        expected = took - (single.compile_s if number == 1 else 0.0)  # later launches find what launch 1 compiled
        say(f"{name}: {took:.0f} s")


def failed_gates(found: list[Record]) -> list[str]:
    """Return the arms whose parity proof ran and failed."""
    return [r.arm for r in found if r.metric == "parity" and r.status == "ok" and not r.detail.get("passed", False)]


def agreement_notes(found: list[Record]) -> list[str]:
    """Return one sentence a workload: whether every arm generated the same tokens, or where they part."""
    notes = []
    for label, digests in summary.token_agreement(found).items():
        if len(digests) < 2:
            continue
        if len(set(digests.values())) == 1:
            notes.append(f"{label}: equal output on {', '.join(digests)}")
            continue
        rows = [r for r in found if r.metric == "tokens" and r.workload.label() == label and r.value == 0.0]
        parting = {r.arm: r.detail.get("first_difference") for r in rows}
        reference = rows[-1].detail.get("reference", "") if rows else ""
        places = ", ".join(f"{arm} at row {place[0]} step {place[1]}" for arm, place in parting.items() if place)
        notes.append(f"{label}: differs from {reference}: {places}")
    return notes
