"""Figures of quality: a reader's losses are the decoder's, recovery is 0 behind nothing and 1 behind everything."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from jaxbench import initial, prompts, transformer
from jaxbench.compress import answer_run, artifact, auto, document, evaluate, evaluate_run, evaluation, reading
from jaxbench.compress import config as shapes
from jaxbench.lora import layers
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer, weights
from jaxbench.text import answers
from torch_ref.compress import compressor as torch_compressor

DECODER = cases.LLAMA.model_copy(update={"num_layers": 3, "max_seq_len": 1024})
CONFIG = cases.COMPRESSOR.model_copy(update={"decoder": DECODER, "chunk": 16})
TEXTS = [np.random.default_rng(i).integers(0, DECODER.vocab_size, 300 + 40 * i).astype(np.int32) for i in range(3)]
CONTEXT = 64


@pytest.fixture(scope="module")
def params():
    return {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}


@pytest.fixture(scope="module")
def reader(params):
    return reading.Reader(transformer.build(DECODER, params))


def made_of(params, twin=None):
    held = weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "1" * 64)
    own = shapes.initial_params(CONFIG, 3, distinct=True)
    own = {name: value.astype(np.float32) for name, value in own.items() if shapes.is_trained(name)}
    trained = artifact.Trained(CONFIG, own, held.sha256, "abc", {})
    return auto.AutoCompressor.from_weights(trained, held, tokenizer.load_tokenizer(None), 2, "float32", twin)


@pytest.fixture(scope="module")
def compressor(params):
    return made_of(params)


def test_a_readers_losses_are_the_decoders(reader, params):
    text, model = TEXTS[0][:90], transformer.build(DECODER, params)
    whole = reading.behind_text(text[:50], text[50:], start=3)
    clear = reading.behind_text(text[:50], text[50:], start=3, num_clear=10)
    heard, short = reader([whole, clear])
    logits = np.asarray(model(whole.inputs[None], np.arange(90, dtype=np.int32)[None]), np.float64)[0, 50:]
    logits -= logits.max(axis=1, keepdims=True)
    wanted = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(40), text[50:]]
    np.testing.assert_allclose(heard.losses, wanted, atol=1e-4)
    np.testing.assert_allclose(short.losses, wanted[10:], atol=1e-4)
    np.testing.assert_array_equal(heard.hits, logits.argmax(axis=1) == text[50:])


def test_vectors_that_are_token_embeddings_read_as_those_tokens(reader, params):
    before, asked = TEXTS[1][:12], TEXTS[1][12:20]
    table = params["embed.embedding"]
    as_vectors = reading.behind_vectors(table[before[:-1]], table[before[-1:]], asked, size=DECODER.vocab_size)
    as_tokens = reading.Row(np.concatenate([before, asked[:-1]]), asked, np.zeros((0, 0), np.float32))
    one, other = reader([as_vectors, as_tokens])
    np.testing.assert_allclose(one.losses, other.losses, atol=1e-5)
    moved = reading.behind_vectors(
        table[before[:-1]], table[before[-1:]], asked, size=DECODER.vocab_size, places=np.arange(12) * 3
    )  # fmt: skip
    assert moved.positions.tolist() == [3 * i for i in range(12)] + [34 + i for i in range(7)]
    assert np.abs(reader([moved])[0].losses - one.losses).max() > 1e-4


def test_no_row_is_longer_than_the_decoders_context(reader):
    most, few = DECODER.max_seq_len, np.zeros(8, np.int32)
    rows = [reading.behind_text(np.zeros(most - 8 + more, np.int32), few, start=0) for more in (0, 1)]
    assert len(reader(rows[:1])[0].losses) == 8
    spread = reading.behind_vectors(
        np.zeros((2, 32), np.float32), np.zeros((1, 32), np.float32), few, size=DECODER.vocab_size,
        places=np.array([0, 9, most]),
    )  # fmt: skip
    for row in (rows[1], spread):
        with pytest.raises(ValueError, match=rf"a row has 10(25|32) positions; wanted at most .* context, {most}"):
            reader([rows[0], row])


def test_a_decoder_with_adapters_reads_with_them(params):
    from jaxbench.lora.config import LoraConfig

    adapted = CONFIG.model_copy(update={"lora": LoraConfig(rank=2, alpha=4.0)})
    held = weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "1" * 64)
    own = shapes.initial_params(adapted, 3, distinct=True)
    own = {name: value.astype(np.float32) for name, value in own.items() if shapes.is_trained(name)}
    trained = artifact.Trained(adapted, own, held.sha256, "abc", {})
    made = auto.AutoCompressor.from_weights(trained, held, tokenizer.load_tokenizer(None), 2, "float32")
    row = reading.behind_text(TEXTS[0][:20], TEXTS[0][20:40], start=3)
    whole = transformer.build(
        adapted.adapted, {**params, **made.adapters}, make_layer=layers.make_layer
    )  # fmt: skip
    merged, apart, plain = (
        reading.Reader(model)([row])[0].losses
        for model in (
            transformer.build(DECODER, made.reader(params)), whole, transformer.build(DECODER, params),
        )
    )  # fmt: skip
    np.testing.assert_allclose(merged, apart, atol=1e-4)
    assert np.abs(merged - plain).max() > 1e-2


def test_windows_lie_in_one_text_and_come_from_all(reader):
    drawn = evaluate.windows(TEXTS, 7, seed=0, context=CONTEXT)
    assert [window.document for window in drawn] == [0, 1, 2, 0, 1, 2, 0]
    for window in drawn:
        text, whole = TEXTS[window.document], np.concatenate([window.context, window.following])
        assert any(np.array_equal(text[i : i + len(whole)], whole) for i in range(len(text) - len(whole) + 1))
    with pytest.raises(ValueError, match="the longest text has 380 tokens; wanted 704"):
        evaluate.windows(TEXTS, 7, seed=0)


@pytest.mark.parametrize(("context", "ratio", "kept"), [(17, 2, 9), (3, 4, 1), (64, 4, 16)])
def test_as_many_of_the_last_tokens_are_kept_as_there_are_vectors(reader, compressor, context, ratio, kept):
    drawn = evaluate.windows(TEXTS, 2, seed=0, context=context)
    made = evaluate.compressed(compressor.with_ratio(ratio), drawn)
    found = evaluate.continuation(reader, compressor.with_ratio(ratio), drawn, made, start=1)["keep"][:, 0]
    rows = [reading.behind_text(w.context[context - kept :], w.following, start=1) for w in drawn]
    np.testing.assert_allclose(found, [heard.losses[: evaluate.ASKED].mean() for heard in reader(rows)], atol=1e-6)
    assert kept == len(evaluate.tokens_of(compressor.with_ratio(ratio), drawn[0].context)[0])


def test_a_window_of_few_tokens_is_said_freely_as_far_as_it_goes(compressor):
    drawn = evaluate.windows(TEXTS, 2, seed=0, context=5)

    def generate(ids, *, vectors, max_new_tokens, seed):
        return prompts.Generation(np.stack([w.context for w in drawn]), np.full(2, max_new_tokens))

    made = evaluate.compressed(compressor, drawn)
    np.testing.assert_array_equal(evaluate.said_freely(generate, compressor, drawn, made)["same"], [1, 1])


def test_what_is_said_freely_is_counted_at_its_place_and_wherever_it_stands(compressor):
    drawn = evaluate.windows(TEXTS, 3, seed=0, context=CONTEXT)
    right = [window.context[:16].copy() for window in drawn]
    right[1][4], right[2] = right[1][4] + 1, right[2][:10]  # one wrong token, one answer that ends early

    def generate(ids, *, vectors, max_new_tokens, seed):
        assert max_new_tokens == 16 and len(vectors) == 3 * 9 and ids[1][0] == ids[0][0] + 9
        tokens = np.full((3, 16), -1, np.int32)
        for row, said in zip(tokens, right):
            row[: len(said)] = said
        return prompts.Generation(tokens, np.array([16, 16, 10]))

    found = evaluate.said_freely(generate, compressor, drawn, evaluate.compressed(compressor, drawn))
    np.testing.assert_allclose(found["same"], [1, 15 / 16, 10 / 16])
    texts = [compressor.tokenizer.decode(window.context[:16].tolist()) for window in drawn]
    said = [compressor.tokenizer.decode(ids.tolist()) for ids in right]
    np.testing.assert_allclose(found["words"], [answers.f1(said[i], [texts[i]]) for i in range(3)])
    np.testing.assert_allclose(found["others"], [answers.f1(said[i], [texts[(i + 1) % 3]]) for i in range(3)])


@pytest.mark.parametrize(("dtype", "twin"), [*((each, None) for each in document.DTYPES), ("int8", torch_compressor)])
def test_all_that_is_read_of_a_window_is_what_one_file_of_all_windows_would_hold(params, tmp_path, dtype, twin):
    compressor, read, said = made_of(params, twin), [], []
    count = 33 if dtype == "pq" else 4  # product codes take 1,024 vectors at least
    drawn = evaluate.windows(TEXTS, count, seed=0, context=CONTEXT)
    exact = np.concatenate([evaluate.tokens_of(compressor, window.context)[0] for window in drawn])
    kept = document.restored(document.stored(exact, dtype))
    assert (dtype == "float32") == np.array_equal(kept, exact)
    kept = kept.reshape(count, 4, 8, -1)  # chunks of a window

    def reader(rows, *, progress):
        read.extend(rows)
        return [reading.Heard(np.ones(len(row.asked)), np.ones(len(row.asked), bool)) for row in rows]

    def generate(ids, *, vectors, max_new_tokens, seed):
        said.append(vectors)
        return prompts.Generation(np.zeros((len(ids), max_new_tokens), np.int32), np.full(len(ids), max_new_tokens))

    plan = evaluate_run.Plan((2,), chunks=3, start=1, store=dtype)
    evaluate_run.run(compressor, answer_run.Side(reader, generate), drawn, plan, tmp_path, say=lambda line: None)
    tag = compressor.tag(evaluate.RECONSTRUCT)
    wanted = [np.concatenate([each[0], tag]) for each in kept[:3]]
    np.testing.assert_array_equal(said[0], np.concatenate(wanted))
    back = [row.vectors for row in read if len(row.vectors) == len(wanted[0])]
    assert len(back) == 9
    for i, window in enumerate(wanted):
        zeros, side_by_side, aligned = back[3 * i : 3 * i + 3]
        assert not zeros[:-1].any() and np.array_equal(side_by_side, window) and np.array_equal(aligned, window)
    whole = [row.vectors for row in read if len(row.vectors) == 33][:count]
    np.testing.assert_array_equal(np.stack(whole)[:, :-1], kept.reshape(count, 32, -1))


def test_the_next_text_is_no_control_where_there_is_none(compressor):
    drawn = evaluate.windows(TEXTS, 1, seed=0, context=CONTEXT)

    def generate(ids, *, vectors, max_new_tokens, seed):
        return prompts.Generation(drawn[0].context[None, :max_new_tokens], np.full(1, max_new_tokens))

    found = evaluate.said_freely(generate, compressor, drawn, evaluate.compressed(compressor, drawn))
    assert found["words"].tolist() == [1.0] and np.isnan(found["others"]).all()


DOCUMENTS = [0, 0, 1, 2]


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_nothing_is_recovered_of_a_text_that_is_no_better_than_none(better):
    sign = 1.0 if better == "lower" else -1.0
    none = sign * np.array([3.0, 3.2, 2.9, 3.4])
    for worse in (0.0, 0.1):
        shares = evaluate.share(none, none + sign * worse, none + sign * 0.2, DOCUMENTS, better=better)
        assert np.isnan(shares).all()
    value, low, high = evaluate.share(none, none - sign * 0.1, none - sign * 0.2, DOCUMENTS, better=better)
    assert (value, low, high) == pytest.approx((2, 2, 2))  # better than the whole text


def test_a_share_of_a_gap_that_may_be_0_has_no_interval():
    none, full = np.array([3.0, 3.0, 2.9, 3.4]), np.array([2.7, 2.7, 3.0, 3.3])
    mean, low, _ = evaluate.gap({"none": none[:, None], "full": full[:, None]}, DOCUMENTS, 0)
    assert mean == pytest.approx(0.1) and low < 0
    value, *ends = evaluate.share(none, full, none - 0.05, DOCUMENTS, better="lower")
    assert value == pytest.approx(0.5) and np.isnan(ends).all()
    assert answer_run.percent((value, *ends)) == "50" and answer_run.percent((np.nan,) * 3) == "none"


def test_figures_are_written_by_ratio_and_finished_ones_are_kept(reader, params, compressor, tmp_path, monkeypatch):
    measured = evaluate.bounds

    def swapped(*args, **options):  # a random decoder is better behind nothing than behind the text
        found = measured(*args, **options)
        return found | {"none": found["full"], "full": found["none"]}

    unswapped = measured(reader, compressor, evaluate.windows(TEXTS, 7, seed=0, context=CONTEXT), start=1)
    assert np.isnan(evaluate.recovery(unswapped, "full", [0, 1, 2, 0, 1, 2, 0], 0)).all()
    monkeypatch.setattr(evaluate, "bounds", swapped)
    side = answer_run.side(DECODER, params, compressor.tokenizer, "float32")
    drawn, said = evaluate.windows(TEXTS, 7, seed=0, context=CONTEXT), []  # one text has a window more
    plan = evaluate_run.Plan((2, 4), chunks=3, start=1)
    rows = evaluate_run.run(compressor, side, drawn, plan, tmp_path, say=said.append)
    again = evaluate_run.run(compressor, side, drawn, plan, tmp_path, say=said.append)
    assert again == rows and [row["ratio"] for row in rows] == [2, 4]
    assert all(line.endswith("(finished before)") == (i > 1) for i, line in enumerate(said))
    bounds = evaluate.bounds(reader, compressor, drawn, start=1)
    documents = [window.document for window in drawn]
    assert evaluate.recovery(bounds, "full", documents, 0)[0] == pytest.approx(1.0)
    assert evaluate.recovery(bounds, "none", documents, 1)[0] == 0.0
    assert list(rows[0]["far"]) == ["keep", "tag", "others", "vectors", "aligned"]
    assert all(0 <= rows[0]["freely"][name][0] <= 1 for name in ("same", "words", "others"))
    nats = rows[0]["far_nats"]
    recovered = (nats["none"] - nats["vectors"]) / (nats["none"] - nats["full"])
    assert recovered == pytest.approx(rows[0]["far"]["vectors"][0])
    mean, low, high = rows[0]["far_gap_nats"]
    assert low < mean < high and mean == pytest.approx(nats["none"] - nats["full"])
    assert f"far, of {mean:.3f} [{low:.3f}, {high:.3f}] nats: keep " in said[0]
    value, low, high = rows[0]["read_back"]["vectors"]
    assert 0 <= low <= value <= high <= 1
    about = {"compressor": "abc", "windows": 6, "documents": 3}
    assert "<svg" in evaluate_run.picture(rows, about)


@pytest.mark.parametrize("kind", ["texts", "needles", "questions"])
def test_figures_go_on_with_the_texts_that_they_began_with(tmp_path, kind):
    words, path = tokenizer.load_tokenizer(None), tmp_path / f"own.{'jsonl' if kind == 'questions' else 'txt'}"
    decoder = DECODER.model_copy(update={"vocab_size": words.vocab_size})
    config = CONFIG.model_copy(update={"decoder": decoder})
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(decoder, 0).items()}
    held = weights.load_checkpoint(weights.save_checkpoint(tmp_path / "model", decoder, params, tokenizer=words))
    own = {name: value.astype(np.float32) for name, value in shapes.initial_params(config, 3, distinct=True).items()}
    trained = artifact.Trained(config, own, held.sha256, "abc", {})
    of = {"questions": {"questions": (str(path),)}, "needles": {"data": str(path), "needles": 40}}
    how = evaluation.How(
        load=lambda ratio: auto.AutoCompressor.from_weights(trained, held, words, ratio, "float32"),
        precision="float32", model=str(tmp_path / "model"), ratios=(4,), workdir=tmp_path / "parts", windows=2,
        tokens=16, chunks=1, count=2,
        **of.get(kind, {"data": str(path)}),
    )  # fmt: skip

    def write(mill):
        text = f"The {mill} stands by the river. " * 50
        rows = [
            {"title": f"{i} mills", "context": text[:40], "question": "Where?", "answers": ["river"]} for i in range(40)
        ]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) if kind == "questions" else text)

    write("mill")
    (tmp_path / "parts").mkdir()
    found = evaluation.run(how)
    drawn, sha256 = found.picture, hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.about["model_sha256"] == held.sha256
    assert sha256 in (found.about.get("text_sha256"), *found.about.get("questions_sha256", ()))
    assert kind != "texts" or "<svg" in drawn  # one text: means without intervals
    with pytest.raises(ValueError, match="holds the work of configuration"):
        evaluation.run(how._replace(backend="torch"))  # whose vectors differ by rounding
    longer = {"texts": {"tokens": DECODER.max_seq_len - 191}, "questions": {}, "needles": {}}[kind]
    if longer:
        with pytest.raises(ValueError, match="a row has 1025 positions; wanted at most the decoder's context, 1024"):
            evaluation.run(how._replace(**longer))
    write("mall")  # as many tokens
    with pytest.raises(ValueError, match="holds the work of configuration"):
        evaluation.run(how)
