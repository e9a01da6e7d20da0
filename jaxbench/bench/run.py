"""The comparison from start to report: plan, proof, launches, TPU compile, report (S file).

Each part appends to `results.jsonl` as it ends. An interrupt keeps what is there; `resume` skips finished launches
and parts of the same run: the same configuration, device, host, commit, versions, arms and threads. To keep the budget,
no launch starts that would exceed it, as estimated from the latest launch.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxbench import outputs, process_environment, store
from jaxbench.bench import agreement, launch, parts
from jaxbench.bench.plan import Plan, make_plan
from jaxbench.bench.suite import Suite
from jaxbench.measure import environment, records
from jaxbench.measure.records import Record, RecordFile

RUN_STEP = (
    "The train step is that of experiments/train.py: float32 weights and moments, products in the named type (PyTorch: "
    "autocast), AdamW, clipping at norm 1. MFU is 6 N + 12 L (heads * head_dim) T FLOPs a token, and the same with "
    "half of the second term, over a data sheet's rate or, without one, the faster matrix product of the launch. "
    "Compile time is the wall time of building the step; PyTorch's includes one gradient."
)
LEAST_LAUNCHES = 5  # what verdicts need; measured in docs/comparison.md
SHORT = 0.7  # length of a launch with one round, relative to one with two
REPORT_RESERVE_S = 6  # part of the budget that is reserved for the report


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
    if profile and not suite.dtypes():
        grids = f"prefill.dtypes={list(suite.prefill.dtypes)}, decode.dtypes={list(suite.decode.dtypes)}"
        raise ValueError(f"compare: --profile traces inference, and the suite has none ({grids}); leave --profile out")
    if resume:
        records.read_lines(workdir / records.RESULTS_NAME)  # a damaged file raises before anything is written
    with store.alone(workdir / records.RESULTS_NAME):
        plan = make_plan(suite, device=device, workdir=workdir)
        file = _begun(plan, resume=resume, say=say)
        parts.parity(plan, file, say)
        parts.tpu(plan, file, say)
        run_launches(plan, file, started=started, say=say)
        if profile:
            parts.profile(plan, file, say)
        _note_look(plan, file)
        results = file.of_run(plan.run_id)
    say(f"{sum(r.metric == records.LAUNCH_DONE for r in results)} launches in {time.monotonic() - started:.0f} s")
    return results


def _begun(plan: Plan, *, resume: bool, say: Callable[[str], None]) -> RecordFile:
    """Open the results file of a new or resumed run, and write environment.json and suite.json next to it."""
    suite, workdir = plan.suite, plan.workdir
    file = open_results(plan, resume=resume)
    if aside := file.left_aside(plan.run_id, plan.origin):
        say(aside)
    if not file.of_run(plan.run_id):
        file.append(plan.record(records.RUN, detail=plan.origin))
    facts = environment.describe(threads=plan.threads)
    settings = launch.worker_environment(plan.device, cache=workdir / launch.CACHE, threads=plan.threads)
    facts["settings"] = fair_settings(threads=plan.threads, variables=settings)
    if suite.train.enabled and suite.train.form == "run":
        facts["settings"].append(RUN_STEP)
    outputs.write_json(workdir / "environment.json", facts)
    ids = {"run_id": plan.run_id, "config_id": plan.config_id}
    about = {"device": plan.device, "suite": suite.model_dump(mode="json")}
    outputs.write_json(workdir / "suite.json", ids | about)
    return file


def fair_settings(*, threads: int, variables: Mapping[str, str]) -> list[str]:
    """Return the report's sentences on the settings that all arms share and on inherent differences."""
    malloc = " ".join(f"{name}={value}" for name, value in process_environment.malloc_settings(variables).items())
    return [
        f"Every arm runs on {threads} threads of the same machine, in its own process, one arm at a time.",
        f"Arms start with these malloc settings: {malloc or 'the defaults'}; those of PyTorch and llama.cpp without "
        "MALLOC_ARENA_MAX, which makes PyTorch slower and XLA faster (docs/xla_cpu.md, rule 8).",
        "Every arm gets the same weights, the same prompts, the same dtype, greedy decoding, a fixed number of new "
        "tokens with the end of sequence ignored; float32 tokens are compared between arms.",
        "JAX arms run ahead-of-time compiled programs; torch_eager has no compilation; torch_compile is torch.compile "
        "(Inductor) layer by layer, on a GPU the whole decode step in CUDA graphs; transformers is `generate` with its "
        "own cache, as a user would call it. PyTorch's arms attend with scaled_dot_product_attention and step with its "
        "fused AdamW.",
        "The bfloat16 step of a run multiplies rows by kernels with jaxbench's native products in the flax arm, on one "
        "CPU with AVX-512's bfloat16 and without matrix units; train.kernels=xla leaves them to XLA.",
        "On a CPU torch_eager and torch_compile infer with weights packed for oneDNN's products, and multiply "
        "single rows by plain ones where these are a tenth faster (tried at each launch, `single_row` of its "
        "records); transformers infers without. Where oneDNN has no bfloat16 product (CPUs without AVX-512), products "
        "of several rows are float32's, rounded to bfloat16, as XLA's are; transformers has PyTorch's own.",
        "torch_eager and transformers compute with the sizes they are given; JAX and torch_compile pad prompts to "
        "multiples of 8 tokens (at least 16), above 64 of 16, above 256 of 64, and rows above 8 to multiples of 4. "
        "Rates count the tokens given.",
        "float32 products are float32 on every device: TF32 is off in every arm (jax_default_matmul_precision and "
        "torch.set_float32_matmul_precision are highest).",
        "Compile time, load time and first token are metrics of their own and never part of a rate. Decode rates are "
        "over the steps after the first token. Peak memory is the resident set above the level after imports.",
        "Ratios are per-launch log ratios to the baseline with a moderated t-interval over launches (fresh processes); "
        "verdicts hold after Holm's correction over all rates and first tokens. The orders of the arms are a Williams "
        "square over launches, reversed every other round.",
        "Samples are taken by time. The first ones of a process are left out while they are more than a tenth slower "
        "than the median of those after them; a visit during which a control loop slowed down is made again.",
    ]


def open_results(plan: Plan, *, resume: bool) -> RecordFile:
    """Return the results file; a new run renames an earlier file and never deletes it."""
    file = RecordFile(plan.workdir / records.RESULTS_NAME)
    if not resume:
        file.set_aside()
    return file


def run_launches(plan: Plan, file: RecordFile, *, started: float, say: Callable[[str], None]) -> None:
    """Run the launches that are not finished yet, as far as the budget allows; the first of them always runs."""
    rounds = plan.suite.rounds
    done = file.finished_launches(plan.run_id)
    missing = [index for index in range(1, rounds.launches + 1) if index not in done]
    if len(missing) < rounds.launches:
        say(f"{rounds.launches - len(missing)} of {rounds.launches} launches are already in {file.path.name}")
    shutil.rmtree(plan.workdir / launch.CACHE / launch.PROGRAMS, ignore_errors=True)  # may be of other code
    expected = 0.0
    for index in missing:
        left = rounds.budget_s - (time.monotonic() - started) - REPORT_RESERVE_S
        if expected and left < expected * SHORT:
            reason = f"the budget of {rounds.budget_s:.0f} s ends before launch {index} would; raise rounds.budget_s"
            say(reason)
            file.append(plan.record("budget", status="skipped", reason=reason, launch=index))
            return
        # Launches matter more than rounds: if LEAST_LAUNCHES would not fit, each launch has a single round.
        is_short = expected * max(1, min(LEAST_LAUNCHES, rounds.launches) - index + 1) > left
        is_cold = index == 1 and rounds.launches >= LEAST_LAUNCHES  # compiling already takes long
        num_rounds = 1 if is_short or is_cold else rounds.rounds
        begun, name = time.monotonic(), f"launch {index}/{rounds.launches}"
        if num_rounds < rounds.rounds:
            say(f"{name}: {num_rounds} of {rounds.rounds} rounds, to keep the budget")
        single = launch.Launch(plan, index, file, lambda text, name=name: say(f"{name} {text}"), num_rounds=num_rounds)
        single.run()
        took = time.monotonic() - begun
        expected = took - (single.compile_s if index == 1 else 0.0)  # later launches load what launch 1 compiled
        expected /= SHORT if num_rounds < rounds.rounds else 1.0
        say(f"{name}: {took:.0f} s")


def _note_look(plan: Plan, file: RecordFile) -> None:
    """Keep how many launches the report that follows is of, so that a later one can say that it is not the first."""
    finished = len(file.finished_launches(plan.run_id))
    before = next((r.detail["launches"] for r in file.of_run(plan.run_id) if r.metric == records.LOOK), [])
    if finished and before[-1:] != [finished]:
        file.append(
            plan.record(records.LOOK, value=float(finished), unit="count", detail={"launches": [*before, finished]})
        )


def failures(results: list[Record]) -> list[str]:
    """Return one sentence for each requested part that failed: the reasons for exit code 1.

    Failures are a parity proof that failed or did not end, float32 outputs that differ, and an arm, a TPU compile or a
    trace that broke. What this machine cannot run at all (status skipped: no compiler, no libtpu, no such package) is
    not a failure.
    """
    sentences = [
        f"parity: {record.arm}: worst relative difference {record.detail.get('worst', math.nan):.1e}"
        for record in results
        if record.metric == "parity" and record.status == "ok" and not record.detail.get("passed", False)
    ]
    sentences += agreement.failures(results)
    broken: dict[str, list[str]] = {}
    for record in results:
        if record.status == "error" and not record.metric.startswith("tpu_"):  # tpu_: does not fit, which is a result
            name = {records.SUITE_ARM: f"{record.metric} {record.device}"}.get(record.arm, record.arm)
            what = f"{record.metric}: {name}" if record.metric in ("parity", "profile") else name
            broken.setdefault(what, []).append(record.reason)
    return sentences + [
        f"{what}: {reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
        for what, reasons in broken.items()
    ]
