"""What the cases of compression say of the shipped compressor, and that a broken one fails the gate."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jaxbench import cli
from jaxbench.compress import answering, evaluate, questions, reading
from jaxbench.pretrained import weights
from jaxbench.regress import gate, gate_command, metrics, pairs, run_file, trees, workload_cases
from jaxbench.regress.suite import Suite
from tests.compress.test_auto import held, trained  # noqa: F401  a compressor of random weights

CASE = {"name": "c", "workload": "compression", "ratio": 4, "tokens": 100, "batch": 4, "read": 4, "read_tokens": 48}
SUITE = Suite(cases=[CASE])


def sizes(**changes):
    return Suite(cases=[CASE | changes]).cases[0].model_dump()


@pytest.fixture
def small(held, trained, monkeypatch):  # noqa: F811
    """Every decoder and compressor that is loaded has random weights, few layers and chunks of 16 tokens."""
    from jaxbench.compress import artifact

    wide = held.config.model_copy(update={"max_seq_len": 256})  # a paragraph and its question
    monkeypatch.setattr(weights, "load_checkpoint", lambda model: held._replace(config=wide))
    monkeypatch.setattr(artifact, "load", lambda file, checkpoint: trained)
    monkeypatch.setattr(workload_cases, "QUESTIONS", workload_cases.QUESTIONS[:4])


def prepared(**changes):
    case = workload_cases.Compression(sizes(**changes), None)
    case.load()
    case.prepare()
    return case


def test_figures_are_those_of_the_compressors_own_evaluation(small):
    case = prepared(read_tokens=21)
    own, found = case.compressor, case.measure()
    reader = reading.Reader(answering_decoder(case))
    firsts = np.linspace(0, len(case.ids) - 21, 4).astype(int)
    texts = [case.words.decode(case.ids[first : first + 21].tolist()) for first in firsts]
    windows = [evaluate.Window(0, tokens(case, text), tokens(case, "")) for text in texts]
    made = [(each.vectors, each.positions) for each in own.compress_all(texts, batch=4)]
    right = evaluate.read_back(reader, own, windows, made)["vectors"]  # of first chunks, all of 16 tokens
    assert found["read_back_rate"] == pytest.approx(right.mean(), abs=1e-12)
    asked = [
        questions.Question(
            "", tokens(case, text), tokens(case, questions.asked(question)), tokens(case, f" {said}"), ()
        )
        for text, question, said in workload_cases.asked_about(case.all_text)
    ]
    nats = {}
    for arm in ("closed", "open", "vectors"):
        given = answering.prompts(own, asked, arm)
        rows = [
            reading.Row(np.array([*prompt.ids, *each.answer[:-1]], np.int32), each.answer, prompt.vectors)
            for prompt, each in zip(given, asked, strict=True)
        ]
        nats[arm] = np.array([each.losses.mean() for each in reader(rows)], np.float64)
    assert found["answer_nll"] == pytest.approx(nats["vectors"].mean(), rel=1e-3)  # products in bfloat16 at other sizes
    kept = evaluate.share(nats["closed"], nats["open"], nats["vectors"], range(4), better="lower")[0]
    assert (
        np.isnan(found["retention"]) if np.isnan(kept) else found["retention"] == pytest.approx(max(kept, 0), abs=0.05)
    )


def tokens(case, text):
    return np.array(case.words.encode(text, add_special=False), np.int32)


def answering_decoder(case):
    from jaxbench import transformer

    checkpoint = weights.load_checkpoint(None)
    return transformer.build(checkpoint.config, case.compressor.reader(checkpoint.params), dtype="float32")


@pytest.mark.parametrize("losses, kept", [((3.0, 1.0, 2.5), 0.25), ((3.0, 1.0, 4.0), 0.0), ((1.0, 3.0, 2.0), None)])
def test_retention_is_a_share_of_what_the_paragraph_adds_and_none_where_it_adds_nothing(
    small, monkeypatch, losses, kept
):
    def heard(self, rows):
        windows = [reading.Heard(np.zeros(1, np.float32), np.array([True, False]))] * 4
        return [*windows, *(reading.Heard(np.full(2, each, np.float32), np.zeros(2, bool)) for each in losses * 4)]

    monkeypatch.setattr(reading.Reader, "__call__", heard)
    found = prepared().found
    assert found["read_back_rate"] == 0.5 and found["answer_nll"] == losses[2]
    assert np.isnan(found["retention"]) if kept is None else found["retention"] == kept


def test_a_batch_of_chunks_has_the_vectors_that_one_after_another_have(small):
    one, four = prepared(batch=1, read=0), prepared(batch=4, read=0)
    calls, encode = [], four.compressor.encode
    four.compressor = dataclasses.replace(
        four.compressor, encode=lambda ids, groups: calls.append(len(ids)) or encode(ids, groups)
    )
    found = four.measure()
    assert set(calls) == {4} and len(calls) == -(-found["tokens"] // 16 // 4)
    assert set(found) == {"seconds", "tokens", "tokens_per_vector"}
    assert found["tokens"] == one.measure()["tokens"] and found["tokens_per_vector"] == 4
    ((mine,), (theirs,)) = (each._compressed([each.text]) for each in (one, four))
    assert np.abs(mine.vectors - theirs.vectors).max() < 0.02 * np.abs(mine.vectors).max()  # products in bfloat16


def test_fewer_tokens_per_vector_than_the_ratio_are_critical(small):
    case = prepared(read=0)
    before = counts(case.measure())
    case.compressor = case.compressor.with_ratio(2)
    (found,) = gate.compare(before, counts(case.measure()), SUITE).findings
    assert (found.series, found.level, found.base, found.head) == ("c.tokens_per_vector", "critical", 4, 2)


def counts(found):
    named = {f"c.{name}": value for name, (value,) in pairs.series_of([found]).items()}
    return {name: value for name, value in named.items() if metrics.metric_of(name).kind in metrics.COUNTED}


@pytest.fixture(scope="module")
def shipped():
    """The shipped compressor's case, with what is counted of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload_cases, "QUESTIONS", workload_cases.QUESTIONS[:4])
        case = prepared()
        yield case, counts(case.measure())


def test_the_shipped_compressor_reads_back_half_and_retains_a_part(shipped):
    _, found = shipped
    assert found["c.tokens_per_vector"] == 4
    assert found["c.read_back_rate"] > 0.4 and 0.1 < found["c.retention"] < 1 and found["c.answer_nll"] < 6


def without_adapters(own):
    return dataclasses.replace(own, adapters={name: np.zeros_like(value) for name, value in own.adapters.items()})


def with_others_vectors(own):
    return dataclasses.replace(own, encode=lambda ids, groups: np.roll(own.encode(ids, groups), 1, axis=0))


FAULTS = {
    without_adapters: {"c.read_back_rate", "c.answer_nll"},
    with_others_vectors: {"c.read_back_rate", "c.retention", "c.answer_nll"},
    lambda own: own.with_ratio(8): {"c.read_back_rate"},  # twice the tokens per vector look like an improvement
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_compressor_with_a_fault_fails_the_gate_with_exit_code_1(shipped, monkeypatch, tmp_path, fault):
    case, before = shipped
    monkeypatch.setattr(case, "compressor", fault(case.compressor))
    monkeypatch.setattr(case, "found", {})
    monkeypatch.setattr(workload_cases, "QUESTIONS", workload_cases.QUESTIONS[:4])
    case.prepare()
    after = counts(case.measure())
    levels = {each.series: each.level for each in gate.compare(before, after, SUITE).findings}
    assert FAULTS[fault] <= {name for name, level in levels.items() if level == "critical"}
    given = {"workdir": str(tmp_path / "w"), "device": "cpu", "compare_with": "base", "history": str(tmp_path / "h"),
             "gone": []}  # fmt: skip
    for module in (gate_command, gate_command.history_commands):
        monkeypatch.setattr(module, "VALUES", SimpleNamespace(**given))
    monkeypatch.setattr(trees, "resolved", lambda name: "c" * 40)
    monkeypatch.setattr(gate, "stored", lambda *_, **__: gate.Stored("a", before))
    monkeypatch.setattr(gate, "counts_of", lambda *_, **__: (before, {}))
    assert gate_command.gate(SUITE, say=print) == cli.EXIT_OK
    monkeypatch.setattr(gate, "counts_of", lambda *_, **__: (after, {}))
    with pytest.raises(cli.GateFailed, match=f"critical rise of .*{min(FAULTS[fault])}"):  # exit code 1
        gate_command.gate(SUITE, say=print)


def test_a_case_as_it_was_before_it_could_be_read_goes_on_with_its_history():
    def work(**case):
        return run_file.work_of(
            {"suite": {"cases": [{"name": "c", "workload": "compression", **case}]}}, "c.tokens_per_s"
        )

    before = work(ratio=8, tokens=1000)
    assert work(ratio=8, tokens=1000, batch=1, read=0, read_tokens=192) == before
    assert len({before, work(ratio=8, tokens=1000, batch=2), work(ratio=8, tokens=1000, read=1)}) == 3
