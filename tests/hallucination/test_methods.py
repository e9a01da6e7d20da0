"""The document's techniques as detectors: planted heads, means of members, thresholds, saved, applied by commands."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxbench.hallucination import detector, linear, methods, metrics, saved_detector, score_regression
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.study import rows
from tests.hallucination import small, test_evaluate
from tests.structure import ROOT

HEADS, LAYERS = 12, 4
PLANTED = [3, 7, HEADS + 2]  # two heads and a layer


def made(*, num: int = 300, signal: float = 2.0):
    """Return a table whose labels only the planted columns know: heads fall, the layer rises."""
    table = test_evaluate.made(0.0, num=num)
    random, inputs, labels = np.random.default_rng(1), table.inputs, table.labels
    for families, label in ((inputs.whole, labels.response), (inputs.parts, labels.part)):
        families["external"] = random.standard_normal((len(label), HEADS))
        families["parametric"] = random.standard_normal((len(label), LAYERS))
        families["external"][:, PLANTED[:2]] -= signal * label[:, None]
        families["parametric"][:, PLANTED[2] - HEADS] += signal * label
    return table


@pytest.fixture(scope="module")
def table():
    return made()


def fit(table, method, inner_folds=2, **choice):
    given = {"choice": methods.Choice(**choice), "inner_folds": inner_folds}
    return methods.fit(table.inputs, table.labels, method=method, **given)


def response_logits(fitted, inputs):
    return fitted.stack.logit(detector.said(fitted.members, fitted.fitted, inputs))


def weighing(regression):
    return np.flatnonzero(regression.weights).tolist()


def test_mutual_information_chooses_the_planted_heads_and_the_layer(table):
    fitted = fit(table, "mutual_information", num_columns=3)
    assert list(fitted.members) == ["response 0", "sentence"]
    assert [weighing(each) for each in fitted.fitted.values()] == [PLANTED, PLANTED]
    weights = fitted.fitted["response 0"].weights[PLANTED]
    assert weights[0] < 0 and weights[1] < 0 < weights[2]


def test_mutual_information_sees_what_no_difference_of_means_shows():
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((400, 6)), random.random(400) < 0.5
    x[:, 4] *= np.where(labels, 4.0, 0.3)
    assert methods.informative(x, labels, 1).tolist() == [4]


def test_an_ensemble_is_the_mean_of_its_members_each_on_heads_of_its_own(table):
    fitted = fit(table, "ensemble", num_columns=5, num_members=3)
    members = [name for name, member in fitted.members.items() if not member.of_parts]
    assert len(members) == 3
    drawn = [weighing(fitted.fitted[name]) for name in members]
    assert all(len(heads) == 5 and max(heads) < HEADS for heads in drawn) and len(set(map(tuple, drawn))) == 3
    x = np.concatenate([table.inputs.whole[name] for name in methods.FAMILIES], axis=1)
    expected = np.mean([fitted.fitted[name].logit(x) for name in members], axis=0)
    np.testing.assert_allclose(response_logits(fitted, table.inputs), expected, rtol=1e-9)
    alone = linear.fit(
        x[:, drawn[0]], table.labels.response,
        strength=linear.choose(x[:, drawn[0]], table.labels.response, table.labels.source),
    )  # fmt: skip
    np.testing.assert_allclose(fitted.fitted[members[0]].logit(x), alone.logit(x[:, drawn[0]]), rtol=1e-6, atol=1e-8)


def test_the_mean_of_regressions_is_one_regression():
    random = np.random.default_rng(0)
    parts = [linear.Linear(*random.standard_normal((1, 4)), random.random(4) + 1, *random.standard_normal((1, 4)), c)
             for c in (0.5, -2.0)]  # fmt: skip
    x = random.standard_normal((9, 4))
    np.testing.assert_allclose(methods.mean(parts).logit(x), (parts[0].logit(x) + parts[1].logit(x)) / 2)


@pytest.mark.parametrize(
    "grid", [score_regression.GRID, {n: (v,) for n, v in score_regression.Point()._asdict().items()}]
)
def test_redeep_orders_responses_as_its_regression_does(table, grid):
    fitted = fit(table, "redeep", grid=grid)
    units = score_regression.Units(
        table.inputs.whole["external"], table.inputs.whole["parametric"], table.labels.response, np.arange(300)
    )
    point = score_regression.search(units, grid)[0]
    expected = score_regression.response_scores(score_regression.fit(units, point), units)
    found = response_logits(fitted, table.inputs)
    slope, intercept = np.polyfit(expected, found, 1)
    np.testing.assert_allclose(found, slope * expected + intercept, atol=1e-9)
    assert slope > 0 and len(weighing(fitted.fitted["response 0"])) == point.top_n + point.top_k
    assert metrics.auc(table.labels.response, found) > 0.9


def test_a_sum_that_is_the_same_throughout_weighs_nothing():
    fitted = score_regression.Fitted(score_regression.Point(), np.array([1]), np.array([0]), (2.0, 2.0), (1.0, 3.0))
    assert methods.of_point(fitted, 2, 2).weights.tolist() == [0.0, 0.0, 0.5, 0.0]


def out_of_fold(table, choice):
    """Return redeep's scores of responses by regressions of other sources, and log-odds of them by scikit-learn."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    label, whole = table.labels.response, table.inputs.whole
    fold, scores = linear.folds(table.labels.source, 5, seed=0), np.zeros(len(label))
    for i in range(5):
        train, test = (
            score_regression.Units(whole["external"][at], whole["parametric"][at], label[at], np.arange(at.sum()))
            for at in (fold != i, fold == i)
        )
        scores[fold == i] = score_regression.unit_scores(score_regression.fit(train, choice), test)
    x = StandardScaler().fit_transform(scores[:, None])
    return LogisticRegression(C=1.0).fit(x, label).predict_proba(x)[:, 1]


def test_the_threshold_has_the_highest_f1_on_the_precision_recall_curve_of_other_sources():
    from sklearn.metrics import f1_score, precision_recall_curve

    noisy, point = made(signal=0.7), score_regression.Point()
    grid = {name: (value,) for name, value in point._asdict().items()}
    fitted = fit(noisy, "redeep", inner_folds=5, grid=grid)
    label, said = noisy.labels.response, out_of_fold(noisy, point)
    precision, recall, thresholds = precision_recall_curve(label, said)
    best = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
    assert f1_score(label, said >= fitted.threshold) == pytest.approx(best)
    assert thresholds.min() < fitted.threshold < thresholds.max() and abs(fitted.threshold - 0.5) > 1e-3
    assert f1_score(label, said >= 0.5) < best - 0.01


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_detector_of_a_method_is_saved_and_judges_alike(table, tmp_path, method):
    fitted = fit(table, method, num_columns=4, num_members=2)
    saved_detector.save(tmp_path / "d", saved_detector.Saved(fitted, ReaderSettings(), "sum"))
    expected, again = (
        detector.judge(each, table.inputs) for each in (fitted, saved_detector.load(tmp_path / "d").detector)
    )
    np.testing.assert_array_equal(expected.probability, again.probability)
    np.testing.assert_array_equal(expected.parts, again.parts)
    assert again.tokens == () and metrics.auc(table.labels.part, again.parts) > 0.8
    assert metrics.auc(table.labels.response, again.probability) > 0.75
    flagged = again.probability >= fitted.threshold
    assert metrics.f1(table.labels.response, flagged)[0] > 0.6


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_threshold_does_not_rest_on_what_was_fitted(method):
    noise = made(signal=0.0)
    fitted = fit(noise, method, num_members=2)
    seen = detector.judge(fitted, noise.inputs).probability
    mine = metrics.best_threshold(noise.labels.response, seen)
    assert metrics.auc(noise.labels.response, seen) > 0.55 and mine != fitted.threshold  # better where it was fitted


def test_redeep_keeps_its_order_where_it_is_worth_nothing_on_other_sources():
    fitted = fit(made(signal=0.0), "redeep")
    whole = fitted.fitted["response 0"].weights
    assert whole[:HEADS].max() <= 0 <= whole[HEADS:].min() and whole.any()  # heads speak against, layers for


def test_more_heads_than_there_are_and_one_class_are_refused(table):
    with pytest.raises(ValueError, match="--top_n=13: the scores have 12 columns"):
        fit(table, "redeep", grid=score_regression.GRID | {"top_n": (13,)})
    labels = table.labels._replace(response=np.zeros(300, bool))
    with pytest.raises(ValueError, match="0 of"):
        methods.fit(table.inputs, labels, method="ensemble")


def test_the_rows_of_the_evaluation_choose_the_same_columns(table):
    every, named = np.arange(300), {row.name: row for row in rows.ROWS}
    grid = named["ReDeEP, grid of 1,960 points (11)"].judge(table, every, every).scores
    redeep = response_logits(fit(table, "redeep"), table.inputs)
    assert np.corrcoef(grid, redeep)[0, 1] == pytest.approx(1.0)
    mutual = named["mutual information, 32 columns (13)"].judge(table, every, every).scores
    np.testing.assert_allclose(mutual, response_logits(fit(table, "mutual_information"), table.inputs), rtol=1e-9)


# Commands


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder of twelve sources, a model, and a workdir with their features."""
    folder = tmp_path_factory.mktemp("methods")
    small.write(folder / "data")
    for name in ("sources", "responses"):
        path = folder / f"data/{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        copies = [
            {key: f"{value}.{i}" if key in ("id", "source_id") else value for key, value in line.items()}
            | ({"context": f"{i} {line['context']}"} if "context" in line else {})
            for i in range(6)
            for line in lines
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in copies))
    model = small.model(folder / "model")
    run(folder, "features", f"--data={folder / 'data'}", "--processes=1", model=model)
    return folder, model


def run(folder, command, *words, model):
    settings = (
        () if command == "detect" else (f"--workdir={folder / 'work'}", f"--set=model={model}", "--set=dtype=float32")
    )
    given = [sys.executable, str(ROOT / "experiments/hallucination.py"), command, *settings, *words]
    done = subprocess.run(given, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words", [("redeep", "--top_n=1", "--top_k=1"), ("mutual_information", "--columns=2"), ("ensemble", "--members=3")]
)
def test_the_command_fits_a_method(place, tmp_path, words):
    folder, model = place
    path = tmp_path / "d.safetensors"
    run(folder, "fit", f"--data={folder / 'data'}", f"--method={words[0]}", *words[1:], f"--output={path}", model=model)
    fitted = saved_detector.load(path).detector
    of_responses = [name for name, member in fitted.members.items() if not member.of_parts]
    assert len(of_responses) == (3 if words[0] == "ensemble" else 1)
    if words[0] != "ensemble":
        assert len(weighing(fitted.fitted["response 0"])) == 2
    assert 0 < fitted.threshold < 1


def test_detect_applies_what_fit_by_a_method_wrote(place, tmp_path):
    folder, model = place
    path, output = tmp_path / "d.safetensors", tmp_path / "v.jsonl"
    run(folder, "fit", f"--data={folder / 'data'}", "--method=redeep", f"--output={path}", model=model)
    _, question, context = small.CONTEXTS["s1"]
    row = {"context": context, "question": question, "response": small.RESPONSES[1][3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run(folder, "detect", f"--detector={path}", f"--model={model}", f"--input={tmp_path / 'rows.jsonl'}",
        f"--output={output}", model=model)  # fmt: skip
    verdict = json.loads(output.read_text())
    assert 0 < verdict["probability"] < 1 and len(verdict["sentences"]) == 1 and verdict["spans"] == []
    assert verdict["is_hallucinated"] == (verdict["probability"] >= saved_detector.load(path).detector.threshold)
