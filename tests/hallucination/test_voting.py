"""Votes of several detectors: their scores, what the development responses choose, files, commands, refusals."""

import json

import numpy as np
import pytest

from jaxbench.hallucination import detect, detector, methods, metrics, portable, saved_detector, voting
from jaxbench.hallucination.bulk import run as bulk
from jaxbench.hallucination.detector import Verdicts
from jaxbench.hallucination.score_regression import Units
from jaxbench.hallucination.study import evaluate, votes
from tests.hallucination import small
from tests.hallucination.test_evaluate import SETTINGS
from tests.hallucination.test_evaluate import made as table_of
from tests.hallucination.test_methods import place, run  # noqa: F401 (place is a fixture)
from tests.test_cli import command, refused

PLAIN = detector.Detector({}, {}, None, threshold=0.5, part_threshold=0.5)


def members(*thresholds):
    return [PLAIN._replace(threshold=each) for each in thresholds]


def heard(*rows):
    """Return what members say of responses: one row of probabilities each; of sentences the same."""
    return [Verdicts(np.array(row), np.array(row), ()) for row in rows]


def judged_by(monkeypatch, *rows):
    """Let the members say these probabilities, one row each."""
    said = iter(heard(*rows))
    monkeypatch.setattr(voting.detectors, "judge", lambda *_, **__: next(said))


def labels(*values):
    response = np.array(values, bool)
    return detector.Labels(response, response, np.arange(len(values)).astype(str))


def test_a_majority_is_more_than_half_of_the_members_by_their_own_thresholds():
    three = voting.majority(members(0.5, 0.3, 0.9), "abc")
    said = voting.combine(three, heard([0.6, 0.4, 0.5], [0.2, 0.3, 0.29], [0.8, 0.9, 0.95]))
    np.testing.assert_allclose(said.probability, [1 / 3, 2 / 3, 2 / 3])
    assert (said.probability >= three.threshold).tolist() == [False, True, True]
    two = voting.majority(members(0.5, 0.5), "ab")
    said = voting.combine(two, heard([0.9, 0.9], [0.1, 0.9]))
    assert (said.probability >= two.threshold).tolist() == [False, True]


@pytest.mark.parametrize("num", range(2, 12))
def test_a_majority_of_any_number_counts_one_vote_more_than_half(num):
    made = voting.majority(members(*[0.5] * num), [str(i) for i in range(num)])
    for count in range(num + 1):
        rows = [[1.0] if i < count else [0.0] for i in range(num)]
        assert (voting.combine(made, heard(*rows)).probability[0] >= made.threshold) == (2 * count > num)


def test_a_soft_vote_is_the_mean_and_its_threshold_has_the_best_f1_on_the_development_responses(monkeypatch):
    rows = [0.9, 0.2, 0.4, 0.1], [0.5, 0.4, 0.2, 0.3]
    judged_by(monkeypatch, *rows)
    made = voting.fit(members(0.5, 0.5), "ab", None, labels(1, 0, 1, 0), rule="soft")
    scores = np.array([0.7, 0.3, 0.3, 0.2])
    np.testing.assert_allclose(voting.combine(made, heard(*rows)).probability, scores)
    assert made.threshold == metrics.best_threshold(np.array([1, 0, 1, 0], bool), scores) == 0.25
    np.testing.assert_allclose(made.aucs, [1.0 * 3 / 4 + 1 / 4, 0.5])
    assert made.best == 0 and made.own_thresholds[0] == pytest.approx(0.3)


def test_weights_are_in_proportion_to_auc_above_one_half(monkeypatch):
    rows = [0.1, 0.2, 0.8, 0.9], [0.1, 0.8, 0.2, 0.9], [0.9, 0.8, 0.2, 0.1]  # AUC 1, 3/4 and 0
    judged_by(monkeypatch, *rows)
    made = voting.fit(members(0.5, 0.5, 0.5), "abc", None, labels(0, 0, 1, 1), rule="weighted")
    np.testing.assert_allclose(made.weights, [2 / 3, 1 / 3, 0])
    expected = np.array([2, 1]) @ np.array(rows[:2]) / 3
    np.testing.assert_allclose(voting.combine(made, heard(*rows)).probability, expected)


def test_members_that_are_all_worse_than_chance_have_no_weights(monkeypatch):
    judged_by(monkeypatch, [0.9, 0.1], [0.5, 0.5])
    with pytest.raises(ValueError, match=r"no member has a development AUC above 0.5 \(a 0.000, b 0.500\)"):
        voting.fit(members(0.5, 0.5), "ab", None, labels(0, 1), rule="weighted")


def test_votes_on_tokens_are_of_the_members_that_mark_tokens():
    with_tokens = PLAIN._replace(tokens=("classifier",), token_threshold=0.4)
    made = voting.majority([PLAIN, with_tokens, with_tokens], "abc")
    said = heard([0.1], [0.1], [0.1])
    said[1:] = [each._replace(tokens=(np.array(row),)) for each, row in zip(said[1:], ([0.9, 0.3], [0.5, 0.9]))]
    np.testing.assert_allclose(voting.combine(made, said).tokens[0], [1.0, 0.5])
    assert made.token_threshold == 1.0
    weighed = made._replace(rule="weighted", weights=np.array([0.2, 0.6, 0.2]))
    np.testing.assert_allclose(voting.combine(weighed, said).tokens[0], [0.8, 0.45])


def test_a_vote_of_one_of_votes_or_of_two_tuned_readers_is_refused():
    with pytest.raises(ValueError, match=r"vote: 1 detectors \(a\), wanted two or more"):
        voting.majority(members(0.5), "a")
    pair = voting.majority(members(0.5, 0.5), "ab")
    with pytest.raises(ValueError, match="vote: b is a vote of 2 detectors itself, wanted its members"):
        voting.check([PLAIN, pair], "ab")
    tuned = PLAIN._replace(tuned="reader")
    with pytest.raises(ValueError, match="vote: a and c both have a tuned reader, wanted one at most"):
        voting.check([tuned, PLAIN, tuned], "abc")
    with pytest.raises(ValueError, match="1 of 1 development responses are labelled; wanted both classes"):
        voting.fit([PLAIN, PLAIN], "ab", None, labels(1), rule="soft")
    with pytest.raises(ValueError, match="rule='loud' is unknown, wanted hard, soft, weighted"):
        voting.fit([PLAIN, PLAIN], "ab", None, labels(0, 1), rule="loud")


# On tables


@pytest.fixture(scope="module")
def fitted():
    """Return detectors of two halves of the features, a development table and a test table of other sources."""
    seen, development, other = (table_of(2.0, num=150, seed=seed) for seed in range(3))
    halves = {
        "attention": {"response": detector.Member(("context_mass",), False, 0.1),
                      "sentence": detector.Member(("lookback",), True, 0.1)},
        "states": {"response": detector.Member(("surprise",), False, 0.1),
                   "sentence": detector.Member(("states",), True, 0.1)},
    }  # fmt: skip
    found = {name: detector.fit(seen.inputs, seen.labels, members=each) for name, each in halves.items()}
    return found, development, other


@pytest.mark.parametrize("rule", voting.RULES)
def test_a_vote_is_saved_with_its_members_and_judges_alike(fitted, tmp_path, made, rule):
    found, development, other = fitted
    vote = voting.fit([*found.values()], [*found], development.inputs, development.labels, rule=rule)
    path = tmp_path / "vote.safetensors"
    settings = saved_detector.load(made[2]).settings
    saved_detector.save(path, saved_detector.Saved(vote, settings, "0" * 64, ("a", "b")))
    again = saved_detector.load(path)
    assert again.contexts == ("a", "b") and again.detector.names == ("attention", "states")
    assert again.detector.rule == rule and again.detector.best == vote.best
    expected, said = (voting.judge(each, other.inputs) for each in (vote, again.detector))
    np.testing.assert_array_equal(said.probability, expected.probability)
    np.testing.assert_array_equal(said.parts, expected.parts)
    assert again.detector.threshold == vote.threshold and again.detector.part_threshold == vote.part_threshold


def test_nothing_of_the_judged_responses_chooses_the_vote(fitted):
    found, development, other = fitted
    vote = voting.fit([*found.values()], [*found], development.inputs, development.labels, rule="weighted")
    right = evaluate.voted(other, SETTINGS, vote)
    turned = other._replace(labels=other.labels._replace(response=~other.labels.response))
    wrong = evaluate.voted(turned, SETTINGS, vote)
    assert right["vote of 2: weighted"]["versus"]["member"] == wrong["vote of 2: weighted"]["versus"]["member"]
    assert wrong["vote of 2: weighted"]["pooled"][0] == pytest.approx(1 - right["vote of 2: weighted"]["pooled"][0])


def test_a_vote_of_members_that_know_different_things_beats_the_better_of_them(fitted):
    found, development, other = fitted
    vote = voting.fit([*found.values()], [*found], development.inputs, development.labels, rule="soft")
    rows = evaluate.voted(other, SETTINGS, vote)
    row, versus = rows["vote of 2: soft"], rows["vote of 2: soft"]["versus"]
    assert [*rows] == ["vote of 2: soft", "member attention", "member states"]
    best = rows[f"member {versus['member']}"]
    assert best["development_auc"] == max(rows[f"member {name}"]["development_auc"] for name in found)
    assert row["pooled_gain"][0] == pytest.approx(row["pooled"][0] - best["pooled"][0])
    assert row["pooled_gain"][1] > 0  # with its interval
    assert versus["chosen_on"] == "the development responses"
    assert versus["f1_gain"][0] == pytest.approx(row["f1"] - versus["f1"])
    assert versus["f1_gain"][1] <= versus["f1_gain"][0] <= versus["f1_gain"][2]


def test_a_majority_without_development_responses_is_compared_with_the_member_that_does_best_there(fitted):
    found, _, other = fitted
    rows = evaluate.as_saved(other, SETTINGS, voting.majority([*found.values()], [*found]))
    versus = rows["vote of 2: hard"]["versus"]
    aucs = {name: rows[f"member {name}"]["pooled"][0] for name in found}
    assert versus["chosen_on"] == "these responses" and aucs[versus["member"]] == max(aucs.values())
    assert versus["f1"] == rows[f"member {versus['member']}"]["f1"]  # by its own threshold


# Files


def changed(path, folder, name, **changes):
    """Write another detector file: the same with changes of Saved or of its reader's settings."""
    saved = saved_detector.load(path)
    settings = saved.settings.model_copy(update=changes.pop("settings", {}))
    other = folder / f"{name}.safetensors"
    saved_detector.save(other, saved._replace(settings=settings, **changes))
    return other


def test_detectors_of_different_readers_do_not_vote(made, tmp_path):
    path = made[2]
    other = changed(path, tmp_path, "other", model_sha256="1" * 64)
    with pytest.raises(ValueError, match="other.safetensors with 111111111111; wanted detectors of one reader"):
        saved_detector.load_several([path, other])
    other = changed(path, tmp_path, "window", settings={"window": 128})
    with pytest.raises(ValueError, match=r"window.safetensors to window=128; wanted detectors of one reader"):
        saved_detector.load_several([path, other])
    with pytest.raises(ValueError, match=r"detector.safetensors is named 2 times, wanted each detector once"):
        saved_detector.load_several([path, path])


def test_contexts_of_all_members_are_known_to_the_vote(made, tmp_path):
    first = changed(made[2], tmp_path, "first", contexts=("a", "c"))
    second = changed(made[2], tmp_path, "second", contexts=("b", "c"))
    assert saved_detector.load_several([first, second]).contexts == ("a", "b", "c")


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_several_files_and_a_saved_vote_give_verdicts_with_sentences_and_spans(made, tmp_path, package):
    *_, path, _, model = made
    strict = saved_detector.load(path).detector._replace(threshold=2.0, part_threshold=2.0)
    never = changed(path, tmp_path, "never", detector=strict)
    third = changed(path, tmp_path, "third")
    _, question, context = small.CONTEXTS["s1"]
    asked = (context, question, small.RESPONSES[1][3])
    how = {"model": model, "package": package}
    alone = detect.HallucinationDetector(path, **how).detect(*asked)
    voted = detect.HallucinationDetector([path, never, third], **how).detect(*asked)
    assert voted.is_hallucinated == alone.is_hallucinated
    assert voted.probability == pytest.approx(2 / 3 if alone.is_hallucinated else 0)
    assert [each.is_flagged for each in voted.sentences] == [each.is_flagged for each in alone.sentences]
    assert [each[:3] for each in voted.spans] == [each[:3] for each in alone.spans]
    soft = saved_detector.load_several([path, third])
    soft = soft._replace(detector=soft.detector._replace(rule="soft", threshold=0.5))
    saved_detector.save(tmp_path / "vote.safetensors", soft)
    again = detect.HallucinationDetector(tmp_path / "vote.safetensors", **how).detect(*asked)
    assert again.probability == pytest.approx(alone.probability, abs=1e-12)


def test_an_exported_vote_gives_the_verdicts_of_its_file(made, tmp_path):
    *_, path, _, model = made
    third = changed(path, tmp_path, "third")
    portable.write(
        tmp_path / "export", saved_detector.load_several([path, third]), "safetensors", model=model, package="jaxbench"
    )
    _, question, context = small.CONTEXTS["s1"]
    asked = (context, question, small.RESPONSES[1][3])
    expected = detect.HallucinationDetector([path, third], model=model).detect(*asked)
    assert detect.HallucinationDetector(tmp_path / "export").detect(*asked) == expected


def test_a_run_with_another_member_does_not_go_on_with_verdicts_of_the_first(made, tmp_path):
    *_, path, _, _ = made
    other = changed(path, tmp_path, "other")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"context": "a b", "question": "c", "response": "d"}) + "\n")
    wanted = bulk.Outputs(tmp_path / "verdicts.jsonl")
    parts = [bulk.check(str(rows), given, wanted)[0] for given in (str(path), [str(path)], [str(path), str(other)])]
    assert parts[0] == parts[1] != parts[2]


# Commands


@pytest.fixture(scope="module")
def split(place, tmp_path_factory):  # noqa: F811
    """Return a folder with the sources in three parts and two detectors of the first, and the model's."""
    (folder, model), here = place, tmp_path_factory.mktemp("votes")
    for name, chosen in {"fit": "012", "dev": "3", "test": "45"}.items():
        (here / name).mkdir()
        for file in ("sources.jsonl", "responses.jsonl"):
            lines = (folder / "data" / file).read_text().splitlines()
            kept = [line for line in lines if json.loads(line)["source_id"][-1] in chosen]
            (here / name / file).write_text("\n".join(kept) + "\n")
    for method in ("mutual_information", "ensemble"):
        given = (f"--data={here / 'fit'}", f"--method={method}", f"--output={here / method}.safetensors")
        run(folder, "fit", *given, model=model)
    named = [f"--detector={here / method}.safetensors" for method in ("mutual_information", "ensemble")]
    return here, folder, model, named


@pytest.mark.timeout(900)  # commands that start Python and JAX, on a machine that may be shared
def test_vote_writes_one_file_that_evaluate_compares_with_its_best_member(split):
    here, folder, model, named = split
    path, work = here / "vote.safetensors", folder / "work"
    said = run(folder, "vote", *named, "--rule=soft", f"--data={here / 'dev'}", f"--output={path}", model=model)
    assert "mutual_information: development AUC" in said and "(2 detectors, soft;" in said
    saved = saved_detector.load(path)
    assert saved.detector.rule == "soft" and len(saved.contexts) == 8  # of fit and of dev
    said = run(folder, "evaluate", f"--detector={path}", f"--data={here / 'test'}", "--draws=100", model=model)
    found = json.loads((work / "detector_evaluation.json").read_text())
    assert [*found["rows"]] == ["vote of 2: soft", "member mutual_information", "member ensemble"]
    versus = found["rows"]["vote of 2: soft"]["versus"]
    assert versus["chosen_on"] == "the development responses" and "gains are over member " + versus["member"] in said
    words = ("hallucination.py", "evaluate", f"--set=model={model}", "--set=dtype=float32", f"--workdir={work}")
    refused(command(*words, f"--detector={path}", f"--data={here / 'dev'}"), "the detector was fitted to 2 of its 2")


@pytest.mark.timeout(900)
def test_detect_takes_several_files_as_a_majority(split):
    here, folder, model, named = split
    _, question, context = small.CONTEXTS["s1"]
    row = {"context": context, "question": question, "response": small.RESPONSES[1][3]}
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = (f"--model={model}", f"--input={here / 'rows.jsonl'}", f"--output={here / 'v.jsonl'}")
    run(folder, "detect", *named, *given, model=model)
    verdict = json.loads((here / "v.jsonl").read_text())
    assert verdict["probability"] in (0, 0.5, 1)
    assert verdict["is_hallucinated"] == (verdict["probability"] == 1)


# The study


def test_every_response_is_judged_once_by_detectors_and_choices_that_did_not_see_its_source(monkeypatch):
    seen = table_of(1.0, num=120)
    read = []

    def fit(inputs, labels):
        read.append({*labels.source})
        return detector.fit(inputs, labels, members=detector_members(), inner_folds=2)

    def watched(*given, **how):
        chosen.append({*given[3].source})
        return choose(*given, **how)

    chosen, choose = [], voting.fit
    monkeypatch.setattr(votes.voting, "fit", watched)
    found = votes.shuffle(seen.inputs, seen.labels, seed=0, fits={"one": fit, "two": fit})
    assert [*found] == ["one", "two", votes.BEST, "vote: hard", "vote: soft", "vote: weighted"]
    every = {*seen.labels.source}
    judged = [every - fitted - picked for fitted, picked in zip(read[::2], chosen[::3], strict=True)]
    assert sorted(sum(map(sorted, judged), [])) == sorted(every)
    assert all(not fitted & picked for fitted, picked in zip(read[::2], chosen[::3]))
    np.testing.assert_allclose(found["vote: soft"].scores, found["one"].scores)  # of equals the mean is each of them
    rows = votes.figures(seen.labels, [found], draws=100)
    assert rows["vote: soft"]["auc_gain"] == pytest.approx([0, 0, 0]) and "auc_gain" not in rows[votes.BEST]


def detector_members():
    """Return two members of few columns."""
    return {
        "response": detector.Member(("context_mass",), False, 0.1),
        "sentence": detector.Member(("lookback",), True, 0.1),
    }


def test_chunks_are_the_sentences_of_their_responses():
    scores = np.array([[1.0], [2.0], [4.0]])
    units = Units(scores, scores - 1, np.array([0, 1, 0], bool), np.array([1, 0, 1]))
    inputs, labels = votes.as_inputs(units)
    assert inputs.response.tolist() == [0, 1, 1] and labels.part.tolist() == [True, False, False]
    assert inputs.whole["external"].tolist() == [[2.0], [2.5]]
    assert inputs.parts["parametric"].tolist() == [[1.0], [0.0], [3.0]]
    assert labels.response.tolist() == [True, False]


def test_answers_to_one_source_are_on_one_side_of_the_study():
    random = np.random.default_rng(0)
    response = np.repeat(np.arange(48), 3)  # three chunks each; two answers to a source
    label = np.isin(response, np.flatnonzero(np.arange(48) % 4 < 2)) & (np.arange(144) % 3 == 0)
    external = random.random((144, 4)) - label[:, None]
    units = Units(external, random.random((144, 3)), label, response, response // 2)
    inputs, labels = votes.as_inputs(units)
    np.testing.assert_array_equal(labels.source, np.arange(48) // 2)
    seen, point = [], methods.Choice({"top_n": (1,), "top_k": (1,), "alpha": (0.6,), "m": (1.0,)})

    def fit(inputs, labels):
        seen.append({*labels.source})
        return methods.fit(inputs, labels, method="redeep", choice=point, inner_folds=2)

    found = votes.shuffle(inputs, labels, seed=0, fits={"one": fit, "two": fit})
    assert all(len(each.scores) == 48 for each in found.values()) and [len(each) for each in seen] == [12] * 8
