"""A fitted detector in use: saved and read back, verdicts with sentences and passages."""

import functools
import hashlib
import json
import pickle

import numpy as np
import pytest

from jaxbench.hallucination import detect, detector, extract, pooled, ragtruth, saved_detector, verdict
from jaxbench.hallucination.study import table
from jaxbench.pretrained import weights
from tests.hallucination import small
from tests.test_cli import command, refused


def test_a_saved_detector_says_what_the_fitted_one_says(made):
    _, read, path, fitted, _ = made
    again = detector.judge(saved_detector.load(path).detector, read.inputs)
    for one, other in zip(detector.judge(fitted, read.inputs), again):
        np.testing.assert_array_equal(np.concatenate(one, axis=None), np.concatenate(other, axis=None))


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_a_verdict_is_that_of_the_table_and_names_sentences_and_passages(made, package):
    _, read, path, fitted, model = made
    in_use = detect.HallucinationDetector(path, model=model, package=package)
    expected = detector.judge(fitted, read.inputs)
    _, question, context = small.CONTEXTS["s1"]
    found = in_use.detect(context, question, small.RESPONSES[1][3])
    assert found.probability == pytest.approx(expected.probability[1], abs=1e-3)
    assert found.is_hallucinated and fitted.threshold < 0.9
    (sentence,) = found.sentences
    assert sentence.text == "It was built in 1850 by Jonas Reed." and sentence.probability == pytest.approx(
        expected.parts[1], abs=1e-3
    )
    assert sentence.is_flagged == (sentence.probability >= fitted.part_threshold)
    assert sentence.passage.text == "The old mill was built in 1820 by Jonas Reed."
    assert context[sentence.passage.start : sentence.passage.end] == sentence.passage.text
    assert all(small.RESPONSES[1][3][span.start : span.end] == span.text for span in found.spans)
    assert all(span.sentence == 0 and span.passage == sentence.passage for span in found.spans)
    marked = expected.tokens[1] >= fitted.token_threshold
    assert bool(found.spans) == marked.any() and max(
        (span.probability for span in found.spans), default=0.0
    ) == pytest.approx(max(expected.tokens[1][marked], default=0.0), abs=1e-2)
    assert not in_use.detect(context, question, small.RESPONSES[0][3]).is_hallucinated
    with pytest.raises(ValueError, match="response: ' ' is empty"):
        in_use.detect(context, question, " ")
    with pytest.raises(ValueError, match="'\\?!' has no letter and no digit"):
        in_use.detect(context, question, "?!")


@pytest.mark.parametrize("response", ["a", "ab", "Yes", "Yes."])
def test_an_answer_of_fewer_than_five_tokens_is_judged(made, response):
    _, _, path, _, model = made  # the reader's tokens are bytes
    in_use = detect.HallucinationDetector(path, model=model)
    alone = in_use.detect("The mill was built in 1820.", "when", response)
    assert [each.text for each in alone.sentences] == [response] and 0 <= alone.probability <= 1
    follower = in_use.follow("The mill was built in 1820.", "when")
    assert follower.add(response) == () and follower.end() == alone.sentences


def test_answers_of_one_to_six_tokens_are_what_fit_is_given(made, tmp_path):
    settings, folder = small.settings(made[4]), small.write(tmp_path)
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    rows = [rows[0] | {"id": f"r{n}", "response": "In 182"[:n], "labels": []} for n in range(1, 7)]
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = extract.Store(tmp_path / "features", settings, weights.checksum(made[4]))
    load = functools.partial(extract.load_reader, package="jaxbench")
    list(extract.run(extract.groups(small.items(folder), store), extract.Worker(settings, store, load)))
    found = table.make(ragtruth.load(folder), store).inputs.whole["surprise"]
    for number, (item, values) in enumerate(zip(small.items(folder), found, strict=True), 1):
        read = store.read(store.key(item))
        gain = np.pad(read["loss_without"] - read["loss"].astype(np.float64), 2)
        window = [gain[i : i + 5].sum() / 5 for i in range(number)]  # what stands outside of the answer counts as 0
        assert values[pooled.SURPRISE.index("worst_gain")] == pytest.approx(min(window))


def test_a_detector_that_has_read_is_sent_to_other_processes_without_what_it_loaded(made):
    _, _, path, _, model = made
    in_use = detect.HallucinationDetector(path, model=model)
    in_use.detect("The mill was built in 1820.", "when", "In 1820.")
    assert in_use.limits.window == 128
    sent = pickle.loads(pickle.dumps(in_use))
    assert {"reader", "limits", "token_reader"}.isdisjoint(vars(sent)) and sent.saved.settings == in_use.saved.settings


def test_answers_to_one_prompt_are_judged_as_each_alone_and_the_prompt_is_read_once(made, monkeypatch):
    _, _, path, _, model = made
    in_use = detect.HallucinationDetector(path, model=model)
    context, question = "The mill was built in 1820 by Reed.", "when"  # fits the window of 128 tokens
    responses = [row[3] for row in small.RESPONSES[:3]]
    reader, count = in_use.reader.feature_reader, []
    read = reader._reader.read_prompt
    monkeypatch.setattr(reader._reader, "read_prompt", lambda prompts: count.append(prompts) or read(prompts))
    together = in_use.detect_group(context, question, responses)
    assert len(count) == 2  # with the context and without it
    alone = [in_use.detect(context, question, response) for response in responses]
    assert len(count) == 2
    for one, other in zip(together, alone, strict=True):
        assert one.probability == pytest.approx(other.probability, abs=1e-5)
        assert [sentence.text for sentence in one.sentences] == [sentence.text for sentence in other.sentences]
    in_use.detect("Rain fell.", question, responses[0])
    in_use.detect(context, question, responses[0])
    assert len(count) == 4  # another context, then this one again; the prompt without one is the same


def test_a_context_that_is_cut_is_cut_for_each_answer_as_if_it_were_alone(made):
    _, _, path, _, model = made
    in_use = detect.HallucinationDetector(path, model=model)
    responses = ["It was built in 1820.", "It was built in 1820 by Jonas Reed, it burned, it is old."]
    together = in_use.detect_group("The mill was built in 1820. " * 8, "when", responses)
    alone = [in_use.detect("The mill was built in 1820. " * 8, "when", response) for response in responses]
    assert together == alone and 0 < together[0].num_cut < together[1].num_cut


def test_detectors_of_another_model_other_code_or_no_numbers_are_refused(made, tmp_path, monkeypatch):
    _, _, path, fitted, model = made
    saved = saved_detector.load(path)
    with pytest.raises(ValueError, match="fitted with the model of checksum"):
        saved_detector.check_model(saved, "0" * 64, name="other")
    torn = tmp_path / "torn"
    torn.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged or no detector"):
        saved_detector.load(torn)
    with pytest.raises(ValueError, match="is a folder, wanted the file that `hallucination.py fit` writes"):
        saved_detector.load(tmp_path)  # as an export is
    bad = fitted._replace(stack=fitted.stack._replace(intercept=np.array(np.nan)))
    saved_detector.save(tmp_path / "nan", saved._replace(detector=bad))
    with pytest.raises(ValueError, match="stack.intercept is not finite"):
        saved_detector.load(tmp_path / "nan")
    monkeypatch.setattr(saved_detector, "FORMAT", saved_detector.FORMAT + 1)
    with pytest.raises(ValueError, match="another version of jaxbench"):
        saved_detector.load(path)


def test_evaluating_a_detector_refuses_settings_that_it_was_not_fitted_to_and_takes_its_own(made):
    folder, _, path, _, model = made
    words = (f"--data={folder / 'data'}", f"--detector={path}", f"--workdir={folder}", f"--set=model={model}")
    words = ("hallucination.py", "evaluate", *words, "--draws=100")
    told = "detector: fitted to a reader of style=plain, and the settings say style=chat; leave style out"
    refused(command(*words, "--set= style=chat"), told)
    refused(command(*words, "--config=configs/hallucination/reader.yaml"), "dtype=float32", "say dtype=bfloat16")
    done = command(*words, "--set=lens_tokens=3")  # the default file's own values are nobody's wish
    assert done.returncode == 0 and "evaluation.json" in done.stdout, done.stderr
    told = json.loads((folder / "detector_evaluation.json").read_text())
    assert told["detector"] == str(path)
    assert told["detector_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (told["reader"]["lens_tokens"], told["reader"]["dtype"]) == (3, "float32")


def test_a_detector_is_not_judged_on_contexts_that_it_was_fitted_to(made, tmp_path):
    folder, _, path, _, _ = made
    data = ragtruth.load(folder / "data")
    saved, one = saved_detector.load(path), data.sources["s2"]
    seen = saved._replace(contexts=(saved_detector.context_id(one.context),))
    saved_detector.save(tmp_path / "d", seen)
    with pytest.raises(ValueError, match=r"fitted to 1 of its \d contexts, first that of source s2"):
        saved_detector.check_unseen(saved_detector.load(tmp_path / "d"), data, folder=folder)
    saved_detector.check_unseen(saved, data, folder=folder)  # of an older kind: not known what it was fitted to


def test_flags_that_a_saved_detector_would_not_follow_are_refused(made):
    folder, _, path, _, _ = made
    words = ("hallucination.py", "evaluate", f"--data={folder / 'data'}", f"--detector={path}", f"--workdir={folder}")
    refused(command(*words, "--curve", "--folds=9"), "it is judged as it is; leave out --curve, --folds")


def test_a_passage_is_the_sentence_that_shares_most_rare_words():
    passages = verdict.Passages("The mill is old. The mill is red. The bridge is old, and it was painted by Anna.")
    assert passages.nearest("Anna saw the mill.").text.startswith("The bridge")
    assert passages.nearest("A red mill.").text == "The mill is red."
    assert passages.nearest("Snow fell.") is None


def test_the_context_of_a_group_is_cut_into_passages_once(made, monkeypatch):
    _, _, path, _, model = made
    count, passages = [], detect.Passages
    monkeypatch.setattr(detect, "Passages", lambda context: count.append(context) or passages(context))
    _, question, context = small.CONTEXTS["s1"]
    detector = detect.HallucinationDetector(path, model=model)
    found = detector.detect_group(context, question, [row[3] for row in small.RESPONSES[:3]])
    assert count == [context] and len(found) == 3 and found[0].sentences[0].passage.start == 0


@pytest.mark.parametrize("name", ["states", "lookback"])
def test_an_answer_whose_features_are_no_numbers_gets_no_verdict(made, name):
    _, _, path, _, model = made
    detector = detect.HallucinationDetector(path, model=model)
    reader, (_, question, context) = detector.reader.feature_reader, small.CONTEXTS["s1"]
    scores = reader.scores
    reader.scores = lambda *given: (found := scores(*given)) | {name: np.full_like(found[name], np.nan)}
    with pytest.raises(ValueError, match="sentence 1 of 1 has probability nan; the reader's features"):
        detector.detect(context, question, small.RESPONSES[0][3])
