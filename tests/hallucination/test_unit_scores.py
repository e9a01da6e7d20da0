"""Scores of tokens and chunks: the formulas on transformers' attention, what `features` keeps, files of them."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from jaxbench.hallucination import encoding, extract, lexical, pooled, score_regression, stored_scores, unit_scores
from jaxbench.hallucination.bulk import score_files
from jaxbench.parity import hallucination as formulas
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from tests.hallucination import small
from tests.structure import ROOT

CONTEXT, QUESTION = "The old mill was built in 1820 by Reed.", "when"
RESPONSE = "Built in 1820. It fell. And – so?"
SENTENCES = ["Built in 1820.", "It fell.", "And – so?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small.model(tmp_path_factory.mktemp("units") / "model")


@pytest.fixture(scope="module", params=["jaxbench", "torch_ref"])
def scorer(request, model):
    return unit_scores.Scorer(small.settings(model, lens_tokens=None), package=request.param)


@pytest.fixture(scope="module")
def expected(model):
    """Return the scores of RESPONSE by the papers' formulas, from transformers' attention and states in float64."""
    tokenizer = load_tokenizer(str(model))
    response = list(encoding.encode_response(tokenizer, RESPONSE).ids)
    text = encoding.encode_prompt(tokenizer, CONTEXT, QUESTION, window=128 - len(response)).text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double().eval()
    return formulas.by_the_formulas(theirs, formulas.Sample(text, [response]), response)


def test_tokens_score_what_the_formulas_say(scorer, expected):
    found = scorer.tokens(CONTEXT, QUESTION, RESPONSE)
    num = len(RESPONSE.encode())  # the reader's tokens are bytes
    assert found.external.shape == (num, 1, 2) and found.parametric.shape == (num, 1)
    assert np.ptp(expected["external"]) > 0.05 and np.ptp(expected["parametric"]) > 1e-4
    np.testing.assert_allclose(np.moveaxis(found.external, 0, -1), expected["external"], atol=5e-4)
    np.testing.assert_allclose(found.parametric, expected["parametric"], rtol=1e-3, atol=1e-6)


def test_a_token_has_its_id_and_its_characters(scorer):
    found = scorer.tokens(CONTEXT, QUESTION, RESPONSE)
    assert found.token_ids.tolist() == list(RESPONSE.encode())
    assert found.texts(RESPONSE)[:5] == list("Built") and found.texts(RESPONSE)[-1] == "?"
    assert found.texts(RESPONSE).count("–") == 3 and found.num_cut == 0  # which is three bytes


@pytest.mark.parametrize("chunk_tokens", [None, 10, 1, 1000])
def test_a_chunk_scores_the_mean_of_its_tokens(scorer, expected, chunk_tokens):
    found = scorer.chunks(CONTEXT, QUESTION, RESPONSE, chunk_tokens=chunk_tokens)
    num = len(RESPONSE.encode())
    if chunk_tokens is None:
        assert found.texts(RESPONSE) == SENTENCES
        lengths = [len(f"{text} ".encode()) for text in SENTENCES]  # the space behind a sentence is of it
        lengths[-1] -= 1
    else:
        lengths = [min(chunk_tokens, num - start) for start in range(0, num, chunk_tokens)]
    assert found.num_tokens.tolist() == lengths and found.token_ids is None
    ends = np.cumsum(lengths)
    for i, (start, end) in enumerate(zip(ends - lengths, ends)):
        np.testing.assert_allclose(found.external[i], expected["external"][:, :, start:end].mean(-1), atol=5e-4)
        np.testing.assert_allclose(found.parametric[i], expected["parametric"][start:end].mean(0), rtol=1e-3)


def test_fixed_chunks_hold_the_characters_of_their_tokens(scorer):
    found = scorer.chunks(CONTEXT, QUESTION, RESPONSE, chunk_tokens=10)
    assert found.texts(RESPONSE) == ["Built in 1", "820. It fe", "ll. And –", "– so?"]  # bytes 27 to 29 are the dash


def test_a_whole_answer_scores_what_features_are_pooled_to(model, tmp_path):
    settings = small.settings(model, lens_tokens=None)
    store = extract.Store(tmp_path, settings, weights.checksum(str(model)))
    item = extract.Item(CONTEXT, QUESTION, RESPONSE)
    load = functools.partial(extract.load_reader, package="jaxbench")
    list(extract.run(extract.groups([item], store), extract.Worker(settings, store, load)))
    read = store.read(store.key(item))
    tokens = unit_scores.of_tokens(read, list(RESPONSE.encode()))
    np.testing.assert_array_equal(tokens.external, np.moveaxis(read["external"], -1, 0))
    np.testing.assert_array_equal(tokens.parametric, read["parametric"])
    for by_sentence, chunks in ((False, unit_scores.of_chunks(tokens, RESPONSE, chunk_tokens=10**6)),
                                (True, unit_scores.of_chunks(tokens, RESPONSE))):  # fmt: skip
        wanted = pooled.pool(read, RESPONSE, lexical.Lexicon(CONTEXT), by_sentence=by_sentence)
        np.testing.assert_allclose(
            chunks.external.reshape(len(chunks.spans), -1), wanted.families["external"], rtol=1e-6
        )
        np.testing.assert_allclose(chunks.parametric, wanted.families["parametric"], rtol=1e-6)


def test_tokens_without_a_lens_have_no_parametric_score_and_chunks_are_means_of_the_others(model):
    every = unit_scores.Scorer(small.settings(model, lens_tokens=None)).tokens(CONTEXT, QUESTION, RESPONSE)
    few = unit_scores.Scorer(small.settings(model, lens_tokens=3)).tokens(CONTEXT, QUESTION, RESPONSE)
    known = np.flatnonzero(np.isfinite(few.parametric).all(1))
    assert len(known) == 3 and np.isnan(few.parametric).sum() == len(few.parametric) - 3
    np.testing.assert_allclose(few.parametric[known], every.parametric[known], rtol=1e-5)
    chunks = unit_scores.of_chunks(few, RESPONSE, chunk_tokens=2)
    assert np.isfinite(chunks.parametric).sum() == 3 and np.isnan(chunks.parametric[0]).all()
    np.testing.assert_allclose(chunks.parametric[known[0] // 2], few.parametric[known[0]])
    np.testing.assert_allclose(
        unit_scores.of_chunks(few, RESPONSE, chunk_tokens=99).parametric[0], few.parametric[known].mean(0)
    )


@pytest.mark.parametrize(
    ("response", "chunk_tokens", "match"), [("?!", None, "no letter and no digit"), ("ab", 0, "=0")]
)
def test_an_answer_without_chunks_is_refused(scorer, response, chunk_tokens, match):
    with pytest.raises(ValueError, match=match):
        scorer.chunks(CONTEXT, QUESTION, response, chunk_tokens=chunk_tokens)


# Files


def rows(folder):
    """Return four rows with ids and labels."""
    contexts = {key: (context, question or "") for key, (_, question, context) in small.CONTEXTS.items()}
    made = [
        {"context": contexts[source][0], "question": contexts[source][1], "response": response, "id": name,
         "labels": [{"start": a, "end": b} for a, b in spans]}
        for name, source, _, response, spans in small.RESPONSES
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path, made


def command(model, folder, *words):
    return [sys.executable, str(ROOT / "experiments/hallucination.py"), "scores", f"--workdir={folder}",
            f"--set=model={model}", "--set=dtype=float32", "--processes=1", *words]  # fmt: skip


def run(*given):
    done = subprocess.run(command(*given), capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_writes_what_the_function_says_in_both_kinds_and_on_both_backends(model, tmp_path):
    path, made = rows(tmp_path)
    out = run(model, tmp_path / "jax", f"--input={path}", f"--output={tmp_path / 'a.jsonl'}")
    found = lines(tmp_path / "a.jsonl")
    assert f"({len(found)} tokens of 4 responses; 4 responses in" in out
    scorer = unit_scores.Scorer(small.settings(model, lens_tokens=None))
    assert len(found) == sum(len(row["response"]) for row in made)
    for number, row in enumerate(made, 1):
        mine = [line for line in found if line["response"] == number]
        expected = scorer.tokens(row["context"], row["question"], row["response"])
        assert [line["token"] for line in mine] == list(range(len(mine))) and {line["id"] for line in mine} == {
            row["id"]
        }
        assert "".join(line["text"] for line in mine) == row["response"]
        assert [line["token_id"] for line in mine] == expected.token_ids.tolist()
        np.testing.assert_allclose([line["external"] for line in mine], expected.external, atol=1e-3)
        np.testing.assert_allclose([line["parametric"] for line in mine], expected.parametric, rtol=1e-3)
        marked = [line["start"] for line in mine if line["token_label"]]
        assert marked == [place for label in row["labels"] for place in range(label["start"], label["end"])]
    out = run(model, tmp_path / "jax", f"--input={path}", f"--output={tmp_path / 'a.parquet'}")
    assert "4 responses, 0 of them to be read" in out  # the same features, another kind of file
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == found
    run(model, tmp_path / "torch", f"--input={path}", f"--output={tmp_path / 't.jsonl'}", "--backend=torch")
    for mine, theirs in zip(found, lines(tmp_path / "t.jsonl"), strict=True):
        np.testing.assert_allclose(mine.pop("external"), theirs.pop("external"), atol=2e-3)
        np.testing.assert_allclose(mine.pop("parametric"), theirs.pop("parametric"), atol=2e-5)
        assert mine == theirs


def test_chunks_of_a_labelled_folder_are_what_redeep_takes(model, tmp_path):
    folder = small.write(tmp_path / "data")
    run(model, tmp_path, f"--data={folder}", f"--output={tmp_path / 'c.jsonl'}", "--level=chunk")
    found = lines(tmp_path / "c.jsonl")
    assert [line["id"] for line in found] == ["r1", "r2", "r3", "r4"]
    assert [line["source_id"] for line in found] == ["s1", "s1", "s1", "s2"]
    assert [line["chunk_label"] for line in found] == [0, 1, 0, 1]
    units = stored_scores.load(tmp_path / "c.jsonl")
    np.testing.assert_array_equal(units.external, [np.ravel(line["external"]) for line in found])
    np.testing.assert_array_equal(units.parametric, [line["parametric"] for line in found])
    np.testing.assert_array_equal(units.response, range(4))
    np.testing.assert_array_equal(units.source, [0, 0, 0, 1])
    run(model, tmp_path, f"--data={folder}", f"--output={tmp_path / 'c.parquet'}", "--level=chunk")
    for one, other in zip(stored_scores.load(tmp_path / "c.parquet"), units, strict=True):
        np.testing.assert_array_equal(one, other)
    (tmp_path / "bad.parquet").write_bytes((tmp_path / "c.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match="bad.parquet cannot be read as Parquet"):
        stored_scores.load(tmp_path / "bad.parquet")
    point = score_regression.Point(2, 1, 0.6, 1.0)
    assert np.isfinite(score_regression.response_scores(score_regression.fit(units, point), units)).all()


def test_a_killed_run_goes_on_and_leaves_no_part_of_its_output(model, tmp_path):
    path, _ = rows(tmp_path)
    given = (model, tmp_path / "work", f"--input={path}", f"--output={tmp_path / 'o.jsonl'}")
    started = subprocess.Popen(
        command(*given), env=os.environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 200
    while not list((tmp_path / "work").glob("features/*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    there = len(list((tmp_path / "work").glob("features/*/*.safetensors")))
    early = lines(tmp_path / "o.jsonl") if (tmp_path / "o.jsonl").exists() else None  # it was faster than the kill
    assert there and f"4 responses, {4 - there} of them to be read" in run(*given, "--overwrite")
    found = lines(tmp_path / "o.jsonl")
    assert {line["response"] for line in found} == {1, 2, 3, 4} and early in (None, found)


def test_units_that_cannot_all_be_written_leave_nothing(tmp_path):
    def broken():
        yield {"response": 1}
        raise ValueError(f"row {2} is bad")

    with pytest.raises(ValueError, match="row 2 is bad"):
        score_files.write(tmp_path / "o.jsonl", broken(), None)
    assert list(tmp_path.iterdir()) == []


def test_rows_come_from_parquet_with_and_without_ids_and_labels(tmp_path):
    texts = {"context": ["a", "a"], "question": ["b", "b"], "response": ["cd", "ef"]}
    pq.write_table(pa.table(texts), tmp_path / "plain.parquet")
    plain = score_files.of_file(tmp_path / "plain.parquet")
    assert [(row.item.response, row.known, row.marks) for row in plain] == [("cd", {}, None), ("ef", {}, None)]
    assert "id" not in score_files.schema(plain, level="token").names
    pq.write_table(pa.table(texts | {"id": [7, 8], "labels": [[{"start": 0, "end": 1}], None]}), tmp_path / "l.parquet")
    labelled = score_files.of_file(tmp_path / "l.parquet")
    assert [row.marks for row in labelled] == [((0, 1),), None]
    types = score_files.schema(labelled, level="chunk")
    assert types.field("id").type == pa.int64() and "chunk_label" in types.names


def test_a_label_whose_text_is_not_at_its_place_is_named(tmp_path):
    row = {"context": "Built in 1820.", "question": "", "response": "In 1850.", "labels": [{"start": 3, "end": 7}]}
    path = tmp_path / "rows.jsonl"
    for text, is_good in (("1850", True), (None, True), ("In 1", False), (7, False)):
        path.write_text(json.dumps(row | {"labels": [row["labels"][0] | {"text": text}]}))
        if is_good:
            assert score_files.of_file(path)[0].marks == ((3, 7),)
            continue
        with pytest.raises(ValueError, match="rows.jsonl line 1: label"):
            score_files.of_file(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_keep_the_ids_of_their_sources_where_they_have_them(tmp_path, kind):
    row, path = {"context": "a", "question": "b", "response": "cd"}, tmp_path / f"rows.{kind}"
    given = [row | {"source_id": "s1", "num_cut": 0}, row | {"source_id": None, "num_cut": 0}]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(given), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n\n" for each in given))
    found = score_files.of_file(path)
    assert [each.known for each in found] == [{"source_id": "s1"}, {}]
    assert found[1].place == f"{path} {'row 2' if kind == 'parquet' else 'line 3'}"
    types = score_files.schema(found, level="token")
    assert types.names[:3] == ["response", "source_id", "token"] and types.field("source_id").type == pa.string()


def test_stored_features_of_other_tokens_are_named(model, tmp_path):
    settings = small.settings(model, lens_tokens=None)
    store, row = (
        extract.Store(tmp_path, settings, "a model"),
        score_files.Row("row 1", extract.Item(CONTEXT, QUESTION, RESPONSE), {}, None),
    )
    offsets = np.array([(i, i + 1) for i in range(3)], np.int32)
    store.write(store.key(row.item), {"offsets": offsets})
    with pytest.raises(ValueError, match="row 1: .*safetensors holds 3 tokens, which are not the 35 of this tokenizer"):
        list(score_files.lines([row], store, load_tokenizer(str(model)), level="token"))
