"""One launch with stand-in workers: order, records, and what happens when an arm fails."""

import pytest

from jaxbench.bench import agreement, launch, plan, sample_rates
from jaxbench.bench.suite import Suite
from jaxbench.initial import initial_params
from jaxbench.measure import process, records
from jaxbench.measure.process import WorkerError
from jaxbench.measure.records import RecordFile, Workload
from jaxbench.pretrained import weights

SUITE = Suite.model_validate(
    {
        "model": "tiny",
        "arms": ["flax", "equinox", "torch_eager"],
        "prefill": {"dtypes": ["float32"], "prompt_tokens": [32]},
        "decode": {"dtypes": ["float32"], "batches": [2], "prompt_tokens": [8], "new_tokens": 5},
        "train": {"num_layers": 1, "seq_len": 16},
        "rounds": {"launches": 2, "rounds": 2, "sample_s": 0, "warmup": 1},
        "roofline": {"gemm_sizes": [[8, 8, 8]], "dtypes": ["float32"]},
        "tpu": {"topologies": []},
        "parity": [],
        "verdicts": {"control_drift": 1e9},  # no visit is made again
    }
)


class StandIn:
    """Answers like a worker; `faults` maps (arm, operation) to what happens."""

    log: list[tuple[str, str, str]] = []
    faults: dict[tuple[str, str], str] = {}
    closed: list[str] = []
    device_kind = "cpu"
    logits: dict[str, list[float]] = {}  # by arm, after any tokens

    def __init__(self, arm, module, *, environment, log, threads, timeout_s):
        self.arm, self.alive, self.environment = arm, True, environment

    def request(self, operation, **arguments):
        kind = arguments.get("workload", {}).get("kind", "")
        StandIn.log.append((self.arm, operation, kind))
        fault = self.faults.get((self.arm, operation))
        if fault == "fails later":
            fault = "fails" if StandIn.log.count((self.arm, operation, kind)) > 1 else None
        if fault == "dies":
            self.alive = False
            raise WorkerError(f"{self.arm}: worker died in {operation} (signal 9)", fatal=True)
        if fault == "fails":
            raise WorkerError(f"{self.arm}: {operation}: ValueError: no", fatal=False)
        if operation == "start":
            return {"seconds": 1.0, "level_bytes": 10, "skip": fault or "", "versions": {"numpy": "2"}}
        if operation in ("measure", "warm"):
            if kind == "train":
                return {"step_s": 0.5, "loss": 4.0}
            rows, new = arguments["workload"]["batch"], max(arguments["workload"]["new_tokens"], 1)
            token = 7 if fault == "differs" else 1
            return {"first_s": 0.25, "rest_s": 2.0, "tokens": [[1] * (new - 1) + [token]] * rows}
        return {
            "load": {"seconds": 0.1}, "memory": {"peak_memory_bytes": 99},
            "prepare": {"compile_s": 3.0, "flops": 100.0, "temp_bytes": 5, "device_kind": self.device_kind},
            "token_seconds": {"seconds": [0.1, 0.3, 0.2]},
            "logits": {"logits": self.logits.get(self.arm)},
            "unload": {}, "read": {"seconds": [1.0, 0.5]}, "gemm": {"seconds": [1e-6]},
        }[operation]  # fmt: skip

    def close(self):
        StandIn.closed.append(self.arm)


@pytest.fixture
def suite():
    return SUITE


@pytest.fixture
def run_launch(tmp_path, monkeypatch, suite):
    work = plan.make_plan(suite, device="cpu", workdir=tmp_path)
    monkeypatch.setattr(launch, "Worker", StandIn)

    def run(number=1, faults=None, num_rounds=2):
        StandIn.log, StandIn.faults, StandIn.closed = [], faults or {}, []
        file = RecordFile(tmp_path / "results.jsonl")
        launch.Launch(work, number, file, lambda text: None, num_rounds=num_rounds).run()
        return [record for record in file.read() if record.launch == number]

    return run


def pick(found, metric, arm="flax"):
    return next(record for record in found if record.metric == metric and record.arm == arm)


def test_rates_come_from_seconds_by_one_rule(run_launch):
    found = run_launch()
    assert pick(found, "prefill_tokens_per_s").samples == (128.0, 128.0)  # 32 tokens in 0.25 s, two rounds
    assert pick(found, "decode_tokens_per_s").samples == (4.0, 4.0)  # 2 rows, 4 steps after the first token, 2 s
    assert pick(found, "train_tokens_per_s").value == 64.0  # 2 x 16 tokens in 0.5 s
    assert pick(found, "first_token_s").value == 0.25 and pick(found, "peak_memory_bytes").value == 99
    assert pick(found, "read_bandwidth_bytes_per_s", records.SUITE_ARM).value == 2.0 * SUITE.roofline.read_bytes
    assert 0 < pick(found, "decode_tokens_per_s").detail["share_of_roofline"] < 1
    assert pick(found, records.LAUNCH_DONE, records.SUITE_ARM).value == 1


def test_order_changes_by_launch_and_is_reversed_by_round(run_launch):
    for number, first in ((1, ["flax", "equinox", "torch_eager"]), (2, ["equinox", "torch_eager", "flax"])):
        run_launch(number)
        order = [arm for arm, operation, kind in StandIn.log if (operation, kind) == ("measure", "decode")]
        assert order == first + first[::-1]  # round 1, round 2


def test_a_short_launch_has_one_visit_an_arm(run_launch):
    found = run_launch(num_rounds=1)
    assert pick(found, "decode_tokens_per_s").samples == (4.0,)
    assert pick(found, records.LAUNCH_DONE, records.SUITE_ARM).value == 1


@pytest.mark.parametrize(
    "suite", [SUITE.model_copy(update={"rounds": SUITE.rounds.model_copy(update={"fewer": {"equinox": 1}})})]
)
def test_an_arm_of_fewer_launches_leaves_after_them(run_launch):
    assert {r.arm for r in run_launch(1)} >= {"flax", "equinox", "torch_eager"}
    assert "equinox" not in {r.arm for r in run_launch(2)}


LATENCY = SUITE.model_copy(update={"decode": SUITE.decode.model_copy(update={"latency": True})})


@pytest.mark.parametrize("suite", [LATENCY])
def test_every_token_s_time_is_kept_where_the_suite_wants_latencies(run_launch):
    found = pick(run_launch(), "token_s")
    assert found.samples == (0.1, 0.3, 0.2) and found.value == 0.2 and found.workload.kind == "decode"


def test_launch_one_is_the_cold_compile(run_launch):
    assert {r.metric for r in run_launch(1) if r.metric.startswith("compile")} == {"compile_cold_s"}
    assert {r.metric for r in run_launch(2) if r.metric.startswith("compile")} == {"compile_warm_s"}


def test_a_dead_worker_is_a_record_and_the_others_go_on(run_launch):
    found = run_launch(faults={("equinox", "measure"): "dies"})
    errors = [record for record in found if record.status == "error"]
    assert errors and all(r.arm == "equinox" and "worker died in measure (signal 9)" in r.reason for r in errors)
    assert pick(found, "decode_tokens_per_s").value and pick(found, "train_tokens_per_s", "torch_eager").value
    assert not any(r.arm == "equinox" and r.metric == "decode_tokens_per_s" and r.status == "ok" for r in found)
    assert sorted(StandIn.closed) == ["equinox", "flax", "torch_eager"]


def test_an_arm_that_fails_after_its_first_samples_has_an_error_and_no_rate(run_launch):
    found = run_launch(faults={("flax", "measure"): "fails later"})
    for metric in ("prefill_tokens_per_s", "decode_tokens_per_s", "train_tokens_per_s"):
        record = pick(found, metric)
        assert record.status == "error" and record.value is None and "ValueError: no" in record.reason
        assert pick(found, metric, "equinox").status == "ok"
    assert "first_token_s" not in {record.metric for record in found if record.arm == "flax"}


@pytest.mark.parametrize("suite", [LATENCY])
def test_an_arm_whose_latencies_fail_keeps_its_rate(run_launch):
    found = run_launch(faults={("flax", "token_seconds"): "fails"})
    assert pick(found, "decode_tokens_per_s").value == 4.0
    assert pick(found, "token_s").status == "error" and pick(found, "token_s", "equinox").status == "ok"


def test_on_a_cpu_the_roofline_comes_behind_the_last_model(run_launch):
    run_launch()
    operations = [operation for _, operation, _ in StandIn.log]
    assert operations.index("read") > len(operations) - 1 - operations[::-1].index("unload")


IN_ROUNDS = SUITE.model_copy(update={"roofline": SUITE.roofline.model_copy(update={"in_rounds": True})})


@pytest.mark.parametrize("suite", [IN_ROUNDS])
def test_what_reads_between_visits_is_a_process_of_its_own(run_launch):
    """Its array of 256 MiB would lie in the peak of the arm that reads."""
    found = run_launch()
    reads = next(record for record in found if record.metric == "reads_beside")
    assert len(reads.samples) == 2 * 3 and sorted(StandIn.closed) == ["equinox", "flax", "flax", "torch_eager"]
    reader = StandIn.log.index(("flax", "read", ""))
    assert StandIn.log[reader - 1] == ("flax", "start", "")


def test_a_failed_load_names_every_workload_it_costs(run_launch):
    found = run_launch(faults={("flax", "load"): "fails"})
    lost = {r.metric for r in found if r.arm == "flax" and r.status == "error"}
    assert {"prefill_tokens_per_s", "decode_tokens_per_s", "train_tokens_per_s"} <= lost
    assert pick(found, "decode_tokens_per_s", "equinox").value


def test_an_arm_that_cannot_run_here_is_skipped_with_its_reason(run_launch):
    found = run_launch(faults={("torch_eager", "start"): "no compiler"})
    skipped = [record for record in found if record.status == "skipped"]
    assert {r.reason for r in skipped} == {"no compiler"} and len(skipped) == len(SUITE.workloads())


@pytest.mark.parametrize(
    ("margin", "error", "is_tie"),
    [(1.0, 1e-6, False), (1e-6, 1e-6, True), (5e-5, 1e-6, False), (0.01, 0.1, False)],
    ids=["another function", "a near tie", "no tie", "errors far above rounding"],
)
def test_differing_float32_tokens_fail_unless_their_logits_are_a_near_tie(
    run_launch, monkeypatch, margin, error, is_tie
):
    reference = [0.0, 5.0 + margin, *[0.0] * 5, 5.0]  # of tokens 1 and 7
    logits = {"torch_eager": reference, "flax": [value + error for value in reference]}
    monkeypatch.setattr(StandIn, "logits", logits)
    found = run_launch(faults={("flax", "measure"): "differs"})
    decode = [r for r in found if r.workload.kind == "decode"]  # of two prompts with 5 new tokens
    sentence = "tokens: flax from torch_eager on decode float32 b2 p8 n5 at prompt 0 step 4: token 7, torch_eager's 1"
    failures = agreement.failures(decode)
    assert [line.split(" (")[0] for line in failures] == ([] if is_tie else [sentence])
    [note] = agreement.notes(decode)
    assert ("(a near tie: top-two margin" in note) == is_tie


def test_differing_tokens_are_located(run_launch, monkeypatch):
    monkeypatch.setattr(StandIn, "logits", {"torch_eager": [1.0, *[0.0] * 7], "flax": [1.0, *[0.0] * 7]})
    found = run_launch(faults={("flax", "measure"): "differs"})
    tokens = next(r for r in found if r.metric == "tokens" and r.arm == "flax" and r.workload.kind == "decode")
    assert tokens.value == 0.0
    assert tokens.detail["first_difference"] == [0, 4] and tokens.detail["reference"] == "torch_eager"
    same = next(r for r in found if r.metric == "tokens" and r.arm == "equinox" and r.workload.kind == "decode")
    assert same.value == 1.0 and same.detail["first_difference"] is None


def test_an_interrupt_closes_every_worker_and_keeps_finished_stages(run_launch, tmp_path, monkeypatch):
    def interrupted(self, operation, **arguments):
        if arguments.get("workload", {}).get("kind") == "train":
            raise KeyboardInterrupt
        return original(self, operation, **arguments)

    original = StandIn.request
    monkeypatch.setattr(StandIn, "request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_launch()
    kept = RecordFile(tmp_path / "results.jsonl").read()
    assert sorted(StandIn.closed) == ["equinox", "flax", "torch_eager"]
    assert any(r.metric == "decode_tokens_per_s" for r in kept)
    assert not any(r.metric == records.LAUNCH_DONE for r in kept)


def test_workers_get_tuned_malloc_and_a_compile_cache_of_the_run(tmp_path):
    environment = launch.worker_environment("cpu", cache=tmp_path, threads=2)
    assert environment["JAX_PLATFORMS"] == "cpu" and environment["OMP_NUM_THREADS"] == "2"
    assert environment["MALLOC_MMAP_THRESHOLD_"] and environment["HF_HUB_OFFLINE"] == "1"
    of_torch = launch.worker_environment("cpu", cache=tmp_path, threads=2, library="PyTorch")
    assert environment["MALLOC_ARENA_MAX"] == "1" and "MALLOC_ARENA_MAX" not in of_torch
    assert environment["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path))
    workload = Workload(kind="train", dtype="float32", batch=2, prompt_tokens=8)
    assert sample_rates.rates(workload, [{"step_s": 0.5, "loss": 1.0}]) == {"train_tokens_per_s": [32.0]}


def test_the_roofline_s_arrays_are_no_part_of_a_model_s_peak(tmp_path):
    """It has read 256 MiB before it loads 50 kB; malloc keeps freed memory there, so it must be given back."""
    folder = weights.save_checkpoint(tmp_path / "tiny", plan.TINY, initial_params(plan.TINY, 0))
    environment = launch.worker_environment("cpu", cache=tmp_path, threads=1)
    where = {"environment": environment, "log": tmp_path / "log", "timeout_s": 300}
    with process.Worker("torch_eager", launch.WORKER, **where) as worker:
        worker.request("start", device="cpu", checkpoint=str(folder), programs="")
        worker.request("read", size=2**28, repeats=1)
        worker.request("load", dtype="float32")
        assert worker.request("memory")["peak_memory_bytes"] < 2**27


RUN = {"form": "run", "num_layers": 1, "seq_len": 16, "dtype": ["float32", "bfloat16"]}


@pytest.mark.parametrize(
    "suite", [Suite.model_validate(SUITE.model_dump() | {"arms": ["flax", "torch_eager"], "train": RUN})]
)
@pytest.mark.parametrize(("kind", "peak"), [("cpu", 1.024e9), ("NVIDIA H200", 66.9e12)])
def test_a_run_s_step_has_its_mfu_in_both_conventions(run_launch, monkeypatch, kind, peak):
    """Of the tiny model's first layer, by hand: 13,408 parameters, 12 * 4 heads * 8 * 16 tokens for attention."""
    monkeypatch.setattr(StandIn, "device_kind", kind)
    found = run_launch()
    parameters = 128 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 3 * 32
    for metric, attention in (("train_mfu", 6144), ("train_mfu_causal", 3072)):
        record = pick(found, metric)  # 64 tokens/s; the product of 8 x 8 x 8 took a microsecond
        assert record.value == pytest.approx(64.0 * (6 * parameters + attention) / peak, rel=1e-12)
        assert record.samples == (record.value, record.value) and record.unit == "share"
        assert record.detail["peak"] == ("measured" if kind == "cpu" else "data sheet")
    shapes = {record.workload.dtype for record in found if record.metric == "train_tokens_per_s"}
    assert shapes == {"float32", "bfloat16"}
    # No bfloat16 product was timed, so that only a data sheet can give its share.
    narrow = [record for record in found if record.metric == "train_mfu" and record.workload.dtype == "bfloat16"]
    assert len(narrow) == (0 if kind == "cpu" else 2)


def test_on_a_device_the_roofline_s_arrays_live_in_processes_before_the_arms(run_launch, tmp_path, monkeypatch):
    work = plan.make_plan(SUITE, device="cpu", workdir=tmp_path)._replace(device="gpu")
    monkeypatch.setattr(process, "turn", lambda names, shift: list(names))
    StandIn.log, StandIn.closed = [], []
    launch.Launch(work, 1, RecordFile(tmp_path / "results.jsonl"), lambda text: None, num_rounds=1).run()
    operations = [operation for _, operation, _ in StandIn.log]
    last_product = len(operations) - 1 - operations[::-1].index("gemm")
    assert operations[:3] == ["start"] * 3 and operations[last_product + 1 : last_product + 5] == ["start"] * 3 + [
        "load"
    ]
    assert sorted(StandIn.closed) == sorted([*SUITE.arms] * 2)


def test_a_plain_step_has_no_mfu(run_launch):
    assert not [record for record in run_launch() if record.metric.startswith("train_mfu")]
