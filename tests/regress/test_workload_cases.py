"""Cases of single workloads on random weights: what each measures, and what its metrics are judged by."""

import math
import shutil

import jax
import numpy as np
import pytest

from jaxbench.generation import decoder
from jaxbench.pretrained import assets
from jaxbench.regress import case_series, case_worker, judge, metrics, pairs, tiny
from jaxbench.regress.judge import Pair
from jaxbench.regress.suite import Suite
from tests.generation import tiny as byte_model

no_kernels = decoder.why_not_native("cpu")
native = pytest.mark.skipif(no_kernels is not None, reason=f"no native kernels: {no_kernels}")
TIMES = {"first_token_s", "end_to_end_s", "seconds"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A decoder of random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.save(folder)
    return str(folder)


def measured(model=None, **case):
    """Two samples of a case, one after another, by the worker's own steps, and the worker."""
    suite = Suite(cases=[{"name": "a", **case}])
    session = case_worker.Session("head", 1)
    session.start()
    session.load(case=suite.cases[0].model_dump(), model=model)
    session.prepare()
    samples = [session.measure(seconds=0)["samples"][0] for _ in range(2)]
    names = [*pairs.series_of(samples), *(f"{program}.flops" for program in session.programs)]
    for name in names:  # the suite knows every series that is measured
        case_series.check(f"a.{name}", {"a": suite.cases[0]}, key=name)
    return samples, session


@native
@pytest.mark.parametrize("weights", ("float32", "int8", "q8_0", "q4_0"))
def test_native_kernels_generate_in_every_format(model, weights):
    (sample, _), session = measured(model, workload="native", weights=weights, prompt_tokens=8, new_tokens=3)
    assert sample["tokens"] == 2 and len(sample["token_s"]) == 2
    assert sample["end_to_end_s"] == pytest.approx(sample["first_token_s"] + sample["seconds"])
    assert {"prefill", "decode"} == session.programs.keys()


def test_native_kernels_that_cannot_be_had_are_one_error(model, monkeypatch):
    monkeypatch.setattr(decoder, "why_not_native", lambda device, num_devices: "there is no compiler")
    with pytest.raises(decoder.NotAvailable, match="--kernels=native: there is no compiler"):
        measured(model, workload="native")


@native
def test_serving_answers_every_request_and_its_cache_knows_no_prompt(model):
    case = {"requests": 3, "prompt_tokens": 70, "new_tokens": 3, "batch_tokens": 8}
    samples, session = measured(model, workload="serving", **case)
    for sample in samples:
        assert sample["tokens"] == 9 and len(sample["token_s"]) == 6
        assert 0 < sample["first_token_s"] < sample["end_to_end_s"] == sample["seconds"]
    steps = session.case.engine.num_steps
    assert steps >= 2 * 3 * 70 / 8  # a prompt that were found in the cache would take fewer


def test_serving_by_the_frameworks_own_operations(model):
    case = {"kernels": "xla", "requests": 2, "prompt_tokens": 6, "new_tokens": 2, "batch_tokens": 6}
    (sample, _), _ = measured(model, workload="serving", **case)
    assert sample["tokens"] == 4 and len(sample["token_s"]) == 2


def test_a_memory_step_trains_the_memory(model):
    (sample, _), session = measured(model, workload="memory", kind="lmm", seq_len=8, chunk=4)
    assert sample["tokens"] == 8 and session.programs.keys() == {"step"}
    names = session.case.state.params
    assert any(name.startswith("layers.0.block.") for name in names) and "layers.1.mlp_norm.scale" not in names
    assert int(session.case.state.step) == 2 and int(session.case.state.skipped) == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"windows": 1, "seq_len": 513}, "seq_len=513 is above the model's context of 512"),
        ({"windows": 10**6, "seq_len": 16}, r"windows=1000000 of 17 tokens .* are more than the text's \d+"),
    ],
)
def test_windows_beyond_the_context_or_the_text_are_refused(model, sizes, words):
    with pytest.raises(ValueError, match=words):
        measured(model, workload="quality", **sizes)


def test_a_folders_own_tokenizer_is_the_one_that_is_timed(model):
    (sample, _), _ = measured(model, workload="tokenizing", characters=500)
    assert sample["tokens"] == len(assets.default_text()[:500].encode())  # bytes, the small model's tokens


@pytest.mark.parametrize("case", [{"workload": "quality", "windows": 3, "seq_len": 16}, {"workload": "answers"}])
def test_text_is_read_by_the_models_own_tokenizer_and_a_model_without_one_is_refused(model, tmp_path, case):
    _, session = measured(model, **case)
    question = "Question: Which module implements abstract base classes?\nAnswer: the abc module."
    text = question if case["workload"] == "answers" else assets.default_text()[:17]
    assert bytes(token for token in session.case.rows[0].tolist() if token).decode().endswith(text)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="missing tokenizer.json"):
        measured(str(other), **case)


def test_bits_are_divided_by_the_bytes_of_the_tokens_that_are_predicted(model):
    (first, again), session = measured(model, workload="quality", windows=3, seq_len=2)
    case = session.case
    assert case.rows.tobytes() == np.frombuffer(assets.default_text().encode()[:9], np.uint8).astype(np.int32).tobytes()
    logits = np.asarray(case.built(case.rows[:, :-1], np.tile(np.arange(2), (3, 1))), np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    nats = -sum(logs[row, place, case.rows[row, place + 1]] for row in range(3) for place in range(2))
    assert first == again and first["bits_per_byte"] == pytest.approx(nats / math.log(2) / 6, rel=1e-5)


def test_answers_have_the_loss_of_their_tokens_alone(model):
    (first, again), session = measured(model, workload="answers")
    case = session.case
    assert first == again and case.rows.shape == case.is_answer.shape
    row, (places,) = 3, np.nonzero(case.is_answer[3])
    logits = np.asarray(case.built(case.rows, np.tile(np.arange(case.rows.shape[1]), (len(case.rows), 1))), np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    of = [[-logs[i, t - 1, case.rows[i, t]] for t in np.nonzero(case.is_answer[i])[0]] for i in range(len(case.rows))]
    assert len(of[row]) == len(places) and first["answer_nll"] == pytest.approx(np.mean(sum(of, [])), rel=1e-5)


def test_the_detection_rate_is_of_texts_with_the_mark():
    case = {"workload": "detection", "batch": 2, "tokens": 16, "marked": 16}
    (short, again), _ = measured(**case)
    assert short["tokens"] == 32 and 0.2 < short["detection_rate"] == again["detection_rate"] < 1
    (long, _), session = measured(**case, marked_tokens=64)
    assert long["detection_rate"] == 1
    other = session.case.detect(session.case.detector, session.case.marked, type(session.case.key)(1), prompt_lengths=8)
    assert np.mean(other.p_value <= 1e-5) == 0
    assert "detection_rate" not in measured(workload="detection", batch=2, tokens=16)[0][0]


def test_a_row_of_the_parity_table_has_its_float64_error():
    pytest.importorskip("torch", reason="a row compares with PyTorch")
    (first, again), session = measured(workload="parity", gradients=True)
    assert first == again and 2.0**-53 <= first["parity_error"] < 1e-12
    assert session.measure(seconds=0)["recompilations"] == 0
    flax, _ = session.case.sides
    params = flax.get_params()
    with session.case.run.pinned("float64"):
        flax.load_params(params | {"embed.embedding": params["embed.embedding"] * (1 + 1e-6)})
    assert session.case.measure()["parity_error"] > 1e-8


def test_features_of_an_answer_are_read_over_its_context(tmp_path):
    model = str(byte_model.make(tmp_path))
    (sample, _), session = measured(model, workload="hallucination", context_tokens=16, answer_tokens=8)
    assert sample["tokens"] == 24 and set(sample) == {"seconds", "tokens"}
    assert session.measure(seconds=0)["recompilations"] == 0


def test_every_metric_of_a_sample_becomes_a_series_of_its_kind():
    names = ("bits_per_byte", "answer_nll", "detection_rate", "parity_error", "read_back_rate", "retention")
    sample = dict.fromkeys(names, 0.5)
    found = pairs.series_of([sample])
    assert found == {name: [0.5] for name in sample}
    assert {metrics.metric_of(f"a.{name}").kind for name in found} == {"quality"}
    assert Suite(cases=[{"name": "a", "workload": "answers"}]).primaries() == ()


def test_quality_is_judged_by_its_own_margins():
    suite = Suite(cases=[{"name": "a", "workload": "answers"}])
    pairs_of = {
        "a.parity_error": [Pair(1e-15, 9e-15)], "b.parity_error": [Pair(1e-15, 5e-14)],
        "c.parity_error": [Pair(1e-15, 1e-8)], "a.detection_rate": [Pair(0.8, 0.7)], "a.answer_nll": [Pair(2.0, 2.06)],
        "a.utilisation": [Pair(0.9, 0.1)],
    }  # fmt: skip
    found = {each.series: (each.verdict, each.level) for each in judge.judge(pairs_of, suite)}
    assert found == {
        "a.parity_error": ("no change", ""), "b.parity_error": ("regression", "warning"),
        "c.parity_error": ("regression", "critical"), "a.detection_rate": ("regression", "critical"),
        "a.answer_nll": ("regression", "warning"),
    }  # fmt: skip


def test_a_devices_peak_counts_for_the_case_that_raised_it(monkeypatch):
    class Device:
        peak = 100

        def memory_stats(self):
            return {"peak_bytes_in_use": self.peak}

    device, session = Device(), case_worker.Session("head", 1)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    case = Suite(cases=[{"name": "a", "workload": "tokenizing", "characters": 100}]).cases[0].model_dump()
    session.load(case=case, model=None)
    device.peak = 250
    assert session.memory()["device_peak_bytes"] == 250
    session.load(case=case, model=None)
    assert "device_peak_bytes" not in session.memory()
    monkeypatch.undo()
    assert case_worker.device_peak() == 0 or jax.default_backend() != "cpu"


def test_utilisation_is_a_share_of_the_threads():
    _, session = measured(workload="tokenizing", characters=20_000)
    share = session.measure(seconds=0)["utilisation"]
    assert share > 0 and math.isfinite(share)
