"""Detectors and their evaluation: nothing is fitted on what it is judged by, noise stays noise, signal is found."""

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import threadpoolctl
from sklearn.linear_model import LogisticRegression

from jaxbench.hallucination import detector, linear, metrics, ragtruth, token_inputs
from jaxbench.hallucination.study import evaluate, report, rows, table
from tests.hallucination import small
from tests.structure import ROOT
from tests.test_cli import command, refused

SETTINGS = evaluate.Evaluation(draws=100)
NAMES = ("external", "context_mass", "lookback", "states", "surprise")


def made(signal: float, *, num: int = 300, seed: int = 0) -> table.Table:
    """Return a table of random features, of which one column of two families knows the label."""
    random = np.random.default_rng(seed)
    source, parts = np.arange(num) // 5, random.integers(1, 5, num)
    response = np.repeat(np.arange(num), parts)
    label = random.random(num) < 0.4
    part_label = label[response] & np.diff(response, prepend=-1).astype(bool)  # a response's first sentence
    whole = {name: random.standard_normal((num, 6)) for name in NAMES} | {"parametric": random.random((num, 4))}
    inside = {name: random.standard_normal((len(response), 6)) for name in NAMES}
    whole["context_mass"][:, 0] += signal * label
    inside["states"][:, 1] += signal * part_label
    whole["lexical"], inside["lexical"] = (random.integers(0, 9, (n, 7)) * 1.0 for n in (num, len(response)))
    inside["place"] = random.random((len(response), 2))
    tokens = tuple(made_tokens(here, random, signal) for here in label)
    marks = [[(2, 6)] if here else [] for here in label]
    token_labels = tuple(each.labels(mine) for each, mine in zip(tokens, marks))
    labels = detector.Labels(label, part_label, source.astype(str), token_labels)
    task, generator = np.array(["QA", "Summary"])[source % 2], np.array(["one", "two"])[np.arange(num) % 2]
    split = np.where(source < 6, "train", "dev")
    spans = [[(i, i + 1) for i in range(count)] for count in parts]
    inputs = detector.Inputs(whole, inside, response, tokens)
    return table.Table(inputs, labels, task, generator, split, spans, marks, ["." * 20] * num)


def made_tokens(is_hallucinated: bool, random: np.random.Generator, signal: float) -> token_inputs.Tokens:
    """Return a response of six to eight tokens of two characters, whose second and third are wrong if it is."""
    num_tokens = int(random.integers(6, 9))
    columns = random.standard_normal((num_tokens, 5))
    columns[1:3, 0] += signal * is_hallucinated
    ends = 2 * np.arange(1, num_tokens + 1)
    return token_inputs.Tokens(columns.astype(np.float16), np.stack([ends - 2, ends], axis=1))


def by_name(name: str) -> rows.Row:
    return next(row for row in rows.ROWS if row.name == name)


def test_noise_is_noise_out_of_fold_although_it_fits_what_it_saw():
    noise = made(0.0)
    (scores, _), fold = evaluate.out_of_fold(noise, by_name("the detector"), SETTINGS)
    judged = evaluate.judged(noise, SETTINGS)
    assert abs(metrics.auc(noise.labels.response[judged], scores) - 0.5) < 0.1
    whole = detector.fit(noise.inputs, noise.labels)
    member = whole.members["response"]
    seen = whole.fitted["response"].logit(detector.columns(noise.inputs, member))
    assert metrics.auc(noise.labels.response, seen) > 0.58 and len(np.unique(fold)) == 5


def test_a_signal_is_found_by_the_detector_and_beats_the_lexical_regression_with_its_interval():
    found = evaluate.run(made(2.5), SETTINGS, rows=[by_name(name) for name in (rows.BASELINE, "the detector")])
    row = found["the detector"]
    assert row["pooled"][0] > 0.8 and row["stratified_gain"][1] > 0.1 and row["f1"] > 0.6
    assert 0 < row["f1_at_half"] < 1 and found[rows.BASELINE]["f1_at_half"] is None  # whose scores are log-odds
    assert row["spans"]["f1"][0] > 0.5 and row["spans"]["f1"][1] < row["spans"]["f1"][0] < row["spans"]["f1"][2]
    assert row["pooled"][1] < row["pooled"][0] < row["pooled"][2] and "pooled_gain" not in found[rows.BASELINE]


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_every_row_sees_labels_of_other_sources_only(row, monkeypatch):
    seen = made(1.0, num=120)

    def watched(given, train, test):
        assert not set(seen.labels.source[train]) & set(seen.labels.source[test])
        hidden = np.array(given.labels.response)
        hidden[test] = ~hidden[test]  # what is judged must not matter
        parts = np.where(np.isin(given.inputs.response, test), ~given.labels.part, given.labels.part)
        tokens = [~each if i in test else each for i, each in enumerate(given.labels.tokens)]
        turned = given._replace(labels=given.labels._replace(response=hidden, part=parts, tokens=tuple(tokens)))
        expected, again = row.judge(given, train, test), row.judge(turned, train, test)
        np.testing.assert_array_equal(again.scores, expected.scores)
        assert again.spans == expected.spans
        return expected

    (scores, _), _ = evaluate.out_of_fold(seen, row._replace(score=watched), evaluate.Evaluation(folds=2, draws=100))
    assert np.isfinite(scores).all() and len(scores) == (seen.split == "dev").sum()


def test_training_rows_of_a_judged_source_are_left_out():
    seen = made(1.0, num=60)
    seen = seen._replace(split=np.where(np.arange(60) % 5 == 0, "train", "dev"))  # one of each source
    watched = []
    score = lambda given, train, test: watched.append((train, test)) or np.zeros(len(test))
    evaluate.out_of_fold(seen, rows.Row("none", "none", score), SETTINGS)
    assert all(not set(seen.labels.source[train]) & set(seen.labels.source[test]) for train, test in watched)
    assert all((seen.split[test] == "dev").all() for _, test in watched)


def test_two_questions_about_one_document_are_never_split(tmp_path):
    folder = small.write(tmp_path)
    lines = (folder / "sources.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    again = json.loads(lines[0]) | {"source_id": "s3", "question": "by whom"}
    (folder / "sources.jsonl").write_text("".join(lines) + json.dumps(again), encoding="utf-8")
    replies = (folder / "responses.jsonl").read_text(encoding="utf-8")
    (folder / "responses.jsonl").write_text(replies.replace('"r3", "source_id": "s1"', '"r3", "source_id": "s3"'))
    source = table.make(ragtruth.load(folder), None).labels.source
    assert source.tolist() == ["s1", "s1", "s1", "s2"]
    assert len({int(i) for i in linear.folds(source, 2, seed=0)[:3]}) == 1


def test_a_folder_of_training_responses_alone_says_so():
    seen = made(1.0, num=60)
    with pytest.raises(ValueError, match="all 60 responses have split='train', and are only fitted to"):
        evaluate.judged(seen._replace(split=np.full(60, "train")), SETTINGS)


def test_flags_that_would_be_ignored_are_refused(tmp_path):
    words = ("hallucination.py", "evaluate", f"--data={small.write(tmp_path)}", f"--workdir={tmp_path}")
    refused(command(*words, "--noreader", "--curve"), "--curve=True is of the detector, which --noreader leaves out")
    refused(command(*words, "--noreader", "--processes=3"), "--processes=3 is of a --detector with a tuned reader")


def test_sentences_become_a_response_that_one_of_them_is_wrong():
    inputs = detector.Inputs({"x": np.zeros((2, 1))}, {}, np.array([0, 0, 1]))
    found = detector.over_parts(np.array([0.5, 0.5, 0.1]), inputs)
    np.testing.assert_allclose(np.exp(found[:, 0]), [-np.log(0.25) + 1e-3, -np.log(0.9) + 1e-3])
    assert found[0, 1] == pytest.approx(0.0, abs=1e-9) and found[0, 2] == found[0, 1]


def test_taking_responses_takes_their_sentences_in_order():
    inputs = made(0.0, num=30).inputs
    rows_ = np.array([7, 2, 20])
    taken = inputs.take(rows_)
    parts = np.concatenate([np.flatnonzero(inputs.response == i) for i in rows_])
    np.testing.assert_array_equal(taken.parts["states"], inputs.parts["states"][parts])
    np.testing.assert_array_equal(taken.response, np.repeat([0, 1, 2], [(inputs.response == i).sum() for i in rows_]))


def test_probabilities_are_calibrated_and_the_threshold_is_where_f1_is_highest_inside():
    known, judged = made(2.0, num=600, seed=1), made(2.0, num=600, seed=2)
    fitted = detector.fit(known.inputs, known.labels)
    found = detector.judge(fitted, judged.inputs)
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.01)):
        mine = (found.probability >= low) & (found.probability < high)
        assert abs(found.probability[mine].mean() - judged.labels.response[mine].mean()) < 0.15
    assert 0 < fitted.threshold < 1 and len(found.parts) == len(judged.labels.part)


def test_a_saved_detector_is_judged_as_it_is_on_all_but_the_training_split():
    known, new = made(2.0, num=600, seed=1), made(2.0, num=300, seed=2)
    fitted = detector.fit(known.inputs, known.labels)
    rows_ = evaluate.judged(new, SETTINGS)
    (found,) = evaluate.frozen(new, SETTINGS, fitted).values()
    probability, labels = detector.judge(fitted, new.inputs).probability[rows_], new.labels.response[rows_]
    assert found["pooled"][0] == metrics.auc(labels, probability) > 0.7 and len(rows_) < 300
    assert found["f1"] == metrics.f1(labels, probability >= fitted.threshold)[0]
    every = SETTINGS.model_copy(update={"train_split": None})  # as the command asks: nothing is fitted
    assert evaluate.counts(new, every)["responses"] == 300 > evaluate.counts(new, SETTINGS)["responses"] == len(rows_)
    assert evaluate.frozen(new, every, fitted) != evaluate.frozen(new, SETTINGS, fitted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (np.where(x == x.max(), np.nan, x), y), "column 0 of 2 is not finite"),
        (lambda x, y: (x, np.ones_like(y)), "20 of 20 rows are labelled"),
    ],
)
def test_features_that_are_not_finite_and_one_class_are_refused(change, match):
    x, y = np.arange(40.0).reshape(20, 2)[:, ::-1], np.arange(20) % 2 == 0
    with pytest.raises(ValueError, match=match):
        linear.fit(*change(x, y), strength=1.0)
    with pytest.raises(ValueError, match="3 sources cannot be split into 5 folds"):
        linear.folds(np.array(list("aabbc")), 5, seed=0)


def test_a_fit_computes_with_one_thread_and_leaves_the_setting_as_it_was(monkeypatch):
    def num_threads():
        return {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}

    seen, original = [], LogisticRegression.fit
    monkeypatch.setattr(LogisticRegression, "fit", lambda *given: seen.append(num_threads()) or original(*given))
    x = np.random.default_rng(0).standard_normal((30, 3))
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        linear.fit(x, x[:, 0] > 0, strength=1.0)
        assert (seen, num_threads()) == ([{1}], {2})


@pytest.mark.parametrize("value", [np.log1p(3.0), 0.1, 0.0, -1 / 3])
def test_a_column_that_is_the_same_in_all_rows_says_nothing_of_rows_where_it_is_not(value):
    random = np.random.default_rng(0)
    x = np.stack([np.full(391, value), random.standard_normal(391)], axis=1)  # whose mean is not `value` to the bit
    for strength in linear.STRENGTHS:
        fitted = linear.fit(x, x[:, 1] + random.standard_normal(391) > 0, strength=strength)
        same, other = fitted.logit(np.array([[value, 0.5], [value + 1.0, 0.5]]))
        assert abs(same - other) < 1e-6 and np.isfinite(same)
    assert linear.standard(x)[1][0] == 1.0


def test_no_pair_in_any_cell_is_no_figure_and_no_warning():
    seen = made(1.0, num=120)
    seen = seen._replace(generator=np.where(seen.labels.response, "one", "two"))
    settings = evaluate.Evaluation(folds=2, draws=100)
    (found,) = evaluate.run(seen, settings, rows=[by_name(rows.BASELINE)]).values()
    assert np.isnan(found["stratified"]).all() and np.isfinite(found["pooled"]).all()


def test_a_share_of_too_few_sources_is_left_out_and_another_row_is_named():
    seen, settings = made(1.0, num=60), evaluate.Evaluation(folds=2, draws=100)
    curve = [row for row in rows.CURVE if row.name.startswith("the detector, 1/16")]
    left_out = {}
    found = evaluate.run(seen, settings, rows=[by_name(rows.BASELINE), *curve], left_out=left_out)
    assert list(found) == [rows.BASELINE] and list(left_out) == [curve[0].name]
    assert "1 sources cannot be split into 3 folds" in left_out[curve[0].name]
    few = rows.Row("few", "fitted", curve[0].score)
    with pytest.raises(ValueError, match="evaluate: few: folds: 1 sources cannot be split"):
        evaluate.run(seen, settings, rows=[few], left_out=left_out)


def test_labels_that_one_fold_holds_are_told_by_sources():
    seen = made(1.0, num=60)
    mine = seen.labels.source == seen.labels.source[np.argmax(seen.labels.response)]
    tokens = tuple(each & here for each, here in zip(seen.labels.tokens, mine))
    labels = seen.labels._replace(
        response=seen.labels.response & mine, part=seen.labels.part & mine[seen.inputs.response], tokens=tokens
    )
    from jaxbench.hallucination import methods, token_training

    told = "folds: labelled rows are of 1 of 12 sources, and one of {} folds of sources holds them all"
    for fit, folds in (
        (token_training.fit_detector, 3),
        (detector.fit, 5),
        (lambda *given: methods.fit(*given, method="redeep"), 5),
    ):
        with pytest.raises(ValueError, match=told.format(folds)):
            fit(seen.inputs, labels)
    with pytest.raises(ValueError, match="unlabelled rows are of 1 of 12 sources, and one of 3 folds"):
        linear.choose(seen.inputs.whole["states"], ~labels.response, labels.source)


def test_words_alone_are_judged_by_the_command(tmp_path):
    folder = small.write(tmp_path / "data")
    random = np.random.default_rng(0)
    source, response = (json.loads((folder / f"{name}.jsonl").read_text().splitlines()[0]) for name in NAMES_OF)
    sources, responses = [], []
    for i in range(24):
        context = f"{source['context']} House {i}."
        sources.append(source | {"source_id": f"s{i}", "task": ragtruth.TASKS[i % 2], "context": context})
        for j in range(2):
            wrong = bool(random.random() < 0.5)
            text = "It was built in 1850 by Anna." if wrong else "It was built in 1820."
            label = {"start": 0, "end": len(text), "label_type": "Evident Conflict"}
            changed = {"id": f"r{i}.{j}", "source_id": f"s{i}", "response": text, "labels": [label] * wrong}
            responses.append(response | changed)
    for name, lines in zip(NAMES_OF, (sources, responses)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "experiments/hallucination.py"), "evaluate", f"--data={folder}", "--noreader"]
    command += [f"--workdir={tmp_path / 'out'}", "--draws=100", "--folds=3"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    found = kept["rows"]
    files = b"".join((folder / f"{name}.jsonl").read_bytes() for name in NAMES_OF)
    assert kept["data_sha256"] == hashlib.sha256(files).hexdigest() and kept["data_sha256"] in done.stdout
    assert kept["model_sha256"] is None and "jax" in kept["machine"]["versions"]
    assert found["number of novel words"]["pooled"][0] == 1.0 and "the detector" not in found
    assert rows.BASELINE in done.stdout
    lines = list(csv.DictReader((tmp_path / "out" / "evaluation.csv").read_text(encoding="utf-8").splitlines()))
    assert {each["row"]: float(each["pooled"]) for each in lines} == {name: r["pooled"][0] for name, r in found.items()}
    assert sorted(found["the task alone"]["reliability"]) == ["said", "share"]
    assert found[rows.BASELINE]["brier"] is None
    picture = ElementTree.parse(tmp_path / "out" / "evaluation.svg").getroot()
    named = [each.text for each in picture.iter(SVG + "text")]
    assert set(found) <= set(named) and named.index("the task alone") < named.index("number of novel words")
    page = (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")
    assert "Probabilities and how often they come true" in page and rows.BASELINE in page
    again = subprocess.run(
        [*command, "--folds=2"], capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240
    )
    assert again.returncode == 0 and json.loads((tmp_path / "out" / "evaluation.1.json").read_text()) == kept
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["settings"]["folds"] == 2


def test_probabilities_that_come_true_lie_on_the_diagonal():
    random = np.random.default_rng(0)
    probability = random.random(20_000)
    labels = random.random(20_000) < probability
    bins = metrics.reliability(labels, probability)
    assert np.abs(np.array(bins["said"]) - bins["share"]).max() < 0.03 and len(bins["said"]) == 10
    assert metrics.brier(labels, probability) == pytest.approx(1 / 6, abs=0.01)
    assert metrics.brier(labels, labels.astype(float)) == 0.0


def test_a_picture_draws_every_figure_at_its_place_and_none_that_does_not_exist():
    drawn = {"a": {"pooled": [0.2, 0.15, 0.25], "stratified": [math.nan] * 3}}
    drawn["b"] = {"pooled": [1.0, 0.95, 1.0], "stratified": [0.5, 0.45, 0.55]}
    picture = ElementTree.fromstring(report.picture(drawn))
    place = {each.text: float(each.get("x")) for each in picture.iter(SVG + "text") if each.get("class") == "note"}
    circles = [float(each.get("cx")) for each in picture.iter(SVG + "circle") if each.get("r") == "3"]
    assert circles == pytest.approx([place["0.2"], place["1.0"], place["0.5"]], abs=0.1)
    assert len([each for each in picture.iter(SVG + "line") if each.get("class") is None]) == 3


NAMES_OF = ("sources", "responses")
SVG = "{http://www.w3.org/2000/svg}"


def test_features_that_are_missing_are_named(tmp_path):
    from jaxbench.hallucination import extract

    data = ragtruth.load(small.write(tmp_path / "data"))
    store = extract.Store(tmp_path / "features", small.settings(tmp_path), "a model")
    with pytest.raises(ValueError, match="features of response r1 are not in .*run `hallucination.py features`"):
        table.make(data, store)
