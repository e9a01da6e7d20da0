"""A fitted detector in use: saved and read back, verdicts with sentences and passages, a file of rows that goes on."""

import functools
import json

import numpy as np
import pytest

from jaxbench.hallucination import detect, detector, extract, ragtruth, saved_detector, token_inputs, token_training
from jaxbench.hallucination.study import table
from jaxbench.pretrained import weights
from tests.hallucination import small


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder of responses, its table, and the file of a detector that was fitted to six copies of it."""
    folder = tmp_path_factory.mktemp("detect")
    model = small.model(folder / "model")
    settings = small.settings(model)
    data = ragtruth.load(small.write(folder / "data"))
    store = extract.Store(folder / "features", settings, weights.checksum(str(model)))
    load = functools.partial(extract.load_reader, package="jaxbench")
    worker = extract.Worker(settings, store, load)
    list(extract.run(extract.groups(small.items(folder / "data"), store), worker))
    read = table.make(data, store)
    rows = np.tile(np.arange(len(data.responses)), 6)
    inputs = read.inputs.take(np.arange(len(data.responses)))
    repeated = detector.Inputs(
        {name: values[rows] for name, values in inputs.whole.items()},
        {name: np.tile(values, (6, 1)) for name, values in inputs.parts.items()},
        np.concatenate([inputs.response + len(data.responses) * i for i in range(6)]),
        inputs.tokens * 6,
    )
    source = np.array([f"{name} {i}" for i in range(6) for name in read.labels.source])
    labels = detector.Labels(read.labels.response[rows], np.tile(read.labels.part, 6), source, read.labels.tokens * 6)
    fitted = token_training.fit_detector(repeated, labels, token_inputs.Training(learning_rate=0.01, epochs=8))
    path = folder / "detector.safetensors"
    saved_detector.save(path, saved_detector.Saved(fitted, settings, weights.checksum(str(model))))
    return folder, read, path, fitted, str(model)


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
    verdict = in_use.detect(context, question, small.RESPONSES[1][3])
    assert verdict.probability == pytest.approx(expected.probability[1], abs=1e-3)
    assert verdict.is_hallucinated and fitted.threshold < 0.9
    (sentence,) = verdict.sentences
    assert sentence.text == "It was built in 1850 by Jonas Reed." and sentence.probability == pytest.approx(
        expected.parts[1], abs=1e-3
    )
    assert sentence.is_flagged == (sentence.probability >= fitted.part_threshold)
    assert sentence.passage.text == "The old mill was built in 1820 by Jonas Reed."
    assert context[sentence.passage.start : sentence.passage.end] == sentence.passage.text
    assert not in_use.detect(context, question, small.RESPONSES[0][3]).is_hallucinated
    with pytest.raises(ValueError, match="response: ' ' is empty"):
        in_use.detect(context, question, " ")


def test_a_run_that_was_stopped_goes_on_and_writes_every_row_once(made, tmp_path):
    folder, _, path, _, model = made
    source = tmp_path / "rows.jsonl"
    rows = [dict(zip(detect.TEXTS, item), id=i) for i, item in enumerate(small.items(folder / "data"))]
    rows = [row | {"question": row["question"] or ""} for row in rows]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "new" / "verdicts.jsonl"
    part = detect.part_file(output, source, path)
    in_use = detect.HallucinationDetector(path, model=model)
    run = detect.detect_rows(in_use, detect.read_rows(source), part, output)
    assert len([next(run), next(run)]) == 2
    run.close()
    with open(part, "a") as file:
        file.write('{"torn')
    assert not output.exists() and len(list(detect.detect_rows(in_use, detect.read_rows(source), part, output))) == 2
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in found] == [0, 1, 2, 3] and not part.exists()
    assert [row["is_hallucinated"] for row in found] == [False, True, False, True]


def test_detectors_of_another_model_other_code_or_no_numbers_are_refused(made, tmp_path, monkeypatch):
    _, _, path, fitted, model = made
    saved = saved_detector.load(path)
    with pytest.raises(ValueError, match="fitted with the model of checksum"):
        saved_detector.check_model(saved, "0" * 64, name="other")
    torn = tmp_path / "torn"
    torn.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged or no detector"):
        saved_detector.load(torn)
    bad = fitted._replace(stack=fitted.stack._replace(intercept=np.array(np.nan)))
    saved_detector.save(tmp_path / "nan", saved._replace(detector=bad))
    with pytest.raises(ValueError, match="stack.intercept is not finite"):
        saved_detector.load(tmp_path / "nan")
    monkeypatch.setattr(saved_detector, "FORMAT", 3)
    with pytest.raises(ValueError, match="another version of jaxbench"):
        saved_detector.load(path)


def test_a_passage_is_the_sentence_that_shares_most_rare_words():
    passages = detect.Passages("The mill is old. The mill is red. The bridge is old, and it was painted by Anna.")
    assert passages.nearest("Anna saw the mill.").text.startswith("The bridge")
    assert passages.nearest("A red mill.").text == "The mill is red."
    assert passages.nearest("Snow fell.") is None
