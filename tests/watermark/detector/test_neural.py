"""The neural detector: twins, masking, evidence on one scale, files, and training that learns."""

import csv
import dataclasses
import io
import json
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from rich.console import Console

import torch_ref.watermark.detector.neural
from jaxbench.watermark import commands, config, detection, identify, reference
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.detector import features, neural, neural_detection, train_detector, training_data
from jaxbench.watermark.keys import PUBLIC_KEY, Key
from jaxbench.watermark.texts import Ragged
from tests.watermark import vocabulary

SHAPE = features.NeuralConfig(num_rows=64, d_model=12, num_pooled=6, d_hidden=8, dilations=(1, 3))
PARAMS = features.initial_params(SHAPE, 0, distinct=True)
VOCAB = 256


@pytest.fixture(scope="module")
def scorer():
    return neural_detection.Scorer(SHAPE, PARAMS)


def arrays(step=0, batch=6, length=24):
    return features.parity_arrays(SHAPE, batch=batch, length=length, seed=1, step=step)


def marked(scheme, count=160, length=60, seed=0, strength=0.8):
    """Return texts whose tokens are green (or of large words) more often than chance, and their keys."""
    random, keys = np.random.default_rng(seed), [Key(1000 * (seed + 1) + i) for i in range(count)]
    tokens = random.integers(0, VOCAB, (count, length), dtype=np.int32)
    for place in range(1, length):
        context = tokens[:, max(0, place - scheme.context.length) : place]
        if context.shape[1] < scheme.context.length:
            continue
        words = vocabulary.words(scheme, keys, context, vocab_size=VOCAB)
        best = words.argmin(axis=1) if scheme.scheme == "kgw" else words.argmax(axis=1)
        tokens[:, place] = np.where(random.random(count) < strength, best, tokens[:, place])
    return tokens, keys


def test_flax_and_torch_give_the_same_logits(scorer):
    data = arrays()
    wanted = torch_ref.watermark.detector.neural.build(SHAPE, PARAMS)
    with torch.no_grad():
        batch = torch_ref.watermark.detector.neural.Batch(*(torch.tensor(x) for x in data))
        expected = torch_ref.watermark.detector.neural.predict(wanted, batch).numpy()
    np.testing.assert_allclose(scorer(data), expected, rtol=2e-5, atol=2e-5)


def test_padding_and_unscored_evidence_change_nothing(scorer):
    data = arrays(length=20)
    value = np.where(data.scored, data.evidence, np.random.default_rng(0).random(data.evidence.shape))
    longer = [np.pad(x, ((0, 0), (0, 4)), constant_values=fill) for x, fill in ((data.tokens, -1), (value, 0.9))]
    scored = np.pad(data.scored, ((0, 0), (0, 4)))
    np.testing.assert_allclose(
        scorer(features.Arrays(*longer, scored, data.labels)), scorer(data), rtol=1e-5, atol=1e-5
    )


def test_a_text_without_scored_tokens_has_a_finite_logit_and_gradient():
    import jax
    from flax import nnx

    data = arrays()
    batch = neural.Batch(*map(jnp.asarray, data._replace(scored=np.zeros_like(data.scored))))
    graph, state = nnx.split(neural.build(SHAPE, PARAMS))
    loss, grads = jax.jit(jax.value_and_grad(lambda s: neural.loss_fn(nnx.merge(graph, s), batch)))(state)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_scores_do_not_depend_on_the_batch(scorer):
    data = arrays(batch=5)
    alone = np.concatenate([scorer(features.Arrays(*(x[i : i + 1] for x in data))) for i in range(5)])
    np.testing.assert_allclose(alone, scorer(data), rtol=1e-5, atol=1e-5)


def test_common_tokens_have_a_row_of_their_own_and_rare_ones_share():
    rows = neural.table_rows(jnp.array([[0, 31, 32, 64, 96, -1]]), 64)
    np.testing.assert_array_equal(rows, [[0, 31, 32, 32, 32, 0]])


@pytest.mark.parametrize(
    "scheme",
    [
        {"scheme": "kgw", "gamma": 0.25},
        {"scheme": "unigram", "gamma": 0.3},
        {"scheme": "gumbel"},
        {"scheme": "synthid"},
        {"scheme": "dip"},
        {"scheme": "kgw_transformers"},
    ],
    ids=lambda s: s["scheme"],
)
def test_evidence_is_centred_under_another_key_and_stays_inside_the_unit_interval(scheme):
    scheme, random = config.parse_scheme(scheme), np.random.default_rng(0)
    words = scheme.null_words(random, (50, 400))
    value = features.evidence(scheme, reference.Evidence(words, np.ones(words.shape, bool)))
    assert 0 < value.min() and value.max() < 1
    assert value.mean() == pytest.approx(0.5, abs=4 * value.std() / np.sqrt(value.size))
    hidden = features.evidence(scheme, reference.Evidence(words, np.zeros(words.shape, bool)))
    assert (hidden == 0.5).all()


def test_the_largest_word_keeps_a_finite_score_in_float32():
    words = np.array([[0, 2**32 - 1]], np.uint32)
    for scheme in ("gumbel", "synthid"):
        found = reference.Evidence(words, np.ones(words.shape, bool))
        value = features.evidence(config.parse_scheme(scheme), found).astype(np.float32)
        assert 0 < value.min() and value.max() < 1
        scores = neural.token_features(jnp.asarray(value), jnp.ones((1, 2), bool), dtype="float32")
        assert np.isfinite(scores).all()


def test_a_green_token_is_evidence_for_the_mark_and_a_red_one_against_it():
    scheme = config.parse_scheme({"scheme": "kgw", "gamma": 0.25})
    words = np.array([[0, 2**30 - 1, 2**30, 2**32 - 1]], np.uint32)
    value = features.evidence(scheme, reference.Evidence(words, np.ones(words.shape, bool)))
    np.testing.assert_allclose(value, [[0.875, 0.875, 0.375, 0.375]])


def test_conformal_p_counts_the_null_scores_at_or_above():
    null = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(neural_detection.conformal_p(np.array([0.0, 2.0, 5.0]), null), [1.0, 0.8, 0.2])


def test_a_saved_detector_is_read_back_and_a_damaged_one_refused(tmp_path):
    features.save(tmp_path, SHAPE, PARAMS, {"note": "x"})
    shape, params, record = features.load(tmp_path)
    assert shape == SHAPE and record["note"] == "x"
    assert all((params[name] == PARAMS[name].astype(np.float32)).all() for name in PARAMS)
    record = json.loads((tmp_path / "detector.json").read_text())
    (tmp_path / "detector.json").write_text(json.dumps(record | {"sha256": "0" * 64}))
    with pytest.raises(ValueError, match="its record says 0000"):
        features.load(tmp_path)
    with pytest.raises(ValueError, match="cannot be read .*run train-detector first"):
        features.load(tmp_path / "none")


def test_a_saved_detector_gives_a_p_value_of_one_text_with_the_human_text_it_kept(tmp_path):
    scheme = config.parse_scheme("kgw")
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    test = neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB)
    tokens, keys = marked(scheme, count=1, length=40)
    detector = detection.NumpyDetector(scheme, vocab_size=VOCAB)
    (p,), (num_null,), (num_tokens,) = test.detect(detector, Ragged.from_array(tokens), keys)
    assert num_tokens == 32 and 0 < p <= 1 and p * (num_null + 1) == pytest.approx(round(p * (num_null + 1)))
    carrying = detection.NumpyDetector(config.parse_scheme({"scheme": "kgw", "payload_bits": 2}), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="payload_bits=2"):
        test.detect(carrying, Ragged.from_array(tokens), keys)
    with pytest.raises(ValueError, match="vocabulary of 256, the text has 99"):
        neural_detection.NeuralTest(tmp_path, vocab_size=99)
    (tmp_path / "calibration.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"calibration.npy cannot be read .*run train-detector"):
        neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB)


def test_p_values_of_many_texts_are_those_of_each_alone_at_its_own_length(tmp_path):
    scheme, random = config.parse_scheme("kgw"), np.random.default_rng(3)
    human = random.integers(0, VOCAB, (40, 48), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    test, detector = (
        neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB),
        detection.NumpyDetector(scheme, vocab_size=VOCAB),
    )
    lengths, prompts = [60, 0, 9, 33, 1, 9, 48, 20], np.array([0, 0, 0, 3, 0, 2, 5, 20])
    texts = [random.integers(0, VOCAB, length) for length in lengths]
    keys = [Key(i) for i in range(8)]
    found = test.detect(detector, Ragged.from_lists(texts), keys, prompt_lengths=prompts)
    assert found.num_tokens.tolist() == [48, 0, 9, 30, 1, 7, 43, 0]
    assert found.num_null.tolist() == [4000, 0, 4000, 4000, 0, 4000, 4000, 0], "no token of the others is scored"
    scorer, wanted = neural_detection.Scorer(SHAPE, PARAMS), []
    pool = training_data.human_pool(scheme, human, vocab_size=VOCAB)
    for text, key, prompt, count in zip(texts, keys, prompts, found.num_tokens):
        evidence = reference.evidence(
            scheme, key, text[None], np.array([len(text)]), vocab_size=VOCAB, prompt_lengths=prompt
        )
        part = slice(prompt, prompt + count)
        value = features.evidence(scheme, evidence)[:, part].astype(np.float32)
        row = features.Arrays(
            text[None, part].astype(np.int32), value, evidence.scored[:, part], np.zeros(1, np.float32)
        )
        if not row.scored.any():
            wanted.append(1.0)
            continue
        null = neural_detection.null_scores(scorer, pool, length=count, count=4000, seed=0, start=min(prompt, 1))
        wanted.append(neural_detection.conformal_p(scorer(row), null)[0])
    np.testing.assert_allclose(found.p_value, wanted, atol=1.5 / 4001)  # padding moves the last bits of a score
    backwards = test.detect(detector, Ragged.from_lists(texts[::-1]), keys[::-1], prompt_lengths=prompts[::-1])
    assert (backwards.p_value[::-1] == found.p_value).all()


@pytest.mark.parametrize(("width", "count"), [(1, 1), (4, 3), (4, 12)])
def test_p_values_of_unmarked_texts_behind_a_prompt_hold_their_level(tmp_path, width, count):
    scheme, random = config.parse_scheme({"scheme": "kgw", "context": {"width": width}}), np.random.default_rng(5)
    human = random.integers(0, VOCAB, (400, 32), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    test = neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB)
    texts, keys = random.integers(0, VOCAB, (400, 10 + count)), [Key(i) for i in range(400)]
    detector = detection.NumpyDetector(scheme, vocab_size=VOCAB)
    found = test.detect(detector, Ragged.from_array(texts), keys, prompt_lengths=10)
    assert (found.num_tokens == count).all() and (found.num_null == neural_detection.NUM_NULL).all()
    assert scipy.stats.binomtest(int((found.p_value <= 0.05).sum()), 400, 0.05, alternative="greater").pvalue > 1e-4


def test_null_scores_are_kept_for_other_processes_and_a_damaged_file_is_none(tmp_path, monkeypatch):
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path / "detector", SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    detector = detection.NumpyDetector(config.parse_scheme("kgw"), vocab_size=VOCAB)

    def p_values():
        test = neural_detection.NeuralTest(tmp_path / "detector", vocab_size=VOCAB)
        return test.detect(detector, Ragged.from_array(human[:5, :20]), Key(1)).p_value.tolist()

    first = p_values()
    (path,) = (tmp_path / "cache" / "watermark").iterdir()
    kept = np.load(path)
    assert kept.shape == (neural_detection.NUM_NULL,) and p_values() == first
    np.save(path, np.full_like(kept, 1e9))
    assert p_values() == [1.0] * 5, "what is kept is read"
    path.write_bytes(b"no array")
    assert p_values() == first and (np.load(path) == kept).all()


def test_texts_without_a_token_are_no_error_whatever_they_stand_beside(tmp_path):
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    test = neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB)
    detector = detection.NumpyDetector(config.parse_scheme("kgw"), vocab_size=VOCAB)
    for texts in ([[]], [[]] * 150 + [list(range(200))] * 150):
        found = test.detect(detector, Ragged.from_lists(texts), Key(1))
        assert (found.p_value[:150] == 1.0).all() and (found.num_null > 0).tolist() == [bool(text) for text in texts]


def test_a_scheme_with_lists_of_its_own_is_judged_by_them(tmp_path):
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    test = neural_detection.NeuralTest(tmp_path, vocab_size=VOCAB)
    scheme = config.parse_scheme({"scheme": "kgw_transformers"})
    found = test.detect(detection.NumpyDetector(scheme, vocab_size=VOCAB), Ragged.from_array(human[:3]), PUBLIC_KEY)
    assert (found.num_null == neural_detection.NUM_NULL).all() and ((0 < found.p_value) & (found.p_value <= 1)).all()


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_files_are_judged_by_the_network_beside_the_exact_test(tmp_path, kind):
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path / "one", SHAPE, PARAMS, {"vocab_size": VOCAB}, human)
    features.save(tmp_path / "other", SHAPE, PARAMS, {"vocab_size": VOCAB}, human[:20])
    scheme = config.parse_scheme("kgw")
    tokens, keys = marked(scheme, count=5, length=20)
    lines = [json.dumps({"text": row.tolist(), "prompt": 2}) for row in tokens]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    job = bulk_detection.Job(
        (identify.Candidate("kgw", scheme, keys[0]),), vocab_size=VOCAB, prompt_field="prompt", neural=tmp_path / "one"
    )
    bulk_detection.run(str(tmp_path / "in.jsonl"), str(tmp_path / f"out.{kind}"), job)
    if kind == "csv":
        rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    else:
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    detector = detection.NumpyDetector(scheme, vocab_size=VOCAB)
    test = neural_detection.NeuralTest(tmp_path / "one", vocab_size=VOCAB)
    wanted = test.detect(detector, Ragged.from_array(tokens), keys[0], prompt_lengths=2)
    assert [float(row["neural_p_value"]) for row in rows] == wanted.p_value.tolist()
    assert {(int(row["neural_num_null"]), int(row["neural_num_tokens"])) for row in rows} == {(4000, 18)}
    exact = detection.detect(detector, Ragged.from_array(tokens), keys[0], prompt_lengths=2)
    assert [float(row["p_value"]) for row in rows] == exact.p_value.tolist()
    others = {bulk_detection.describe(dataclasses.replace(job, neural=tmp_path / name)) for name in ("one", "other")}
    assert len(others | {bulk_detection.describe(dataclasses.replace(job, neural=None))}) == 3


def test_the_network_reads_what_stands_behind_the_prompt(tmp_path):
    human = np.random.default_rng(3).integers(0, VOCAB, (40, 32), dtype=np.int32)
    features.save(tmp_path, SHAPE, PARAMS, {"vocab_size": VOCAB}, human)

    def said(text, prompt_tokens):
        split = SimpleNamespace(
            vocab_size=VOCAB,
            decode=lambda ids: " ",
            encode_batch=lambda texts, **how: [list(map(int, text.split())) for text in texts],
        )
        candidate = identify.Candidate("kgw", config.parse_scheme("kgw"), Key(5))
        job = bulk_detection.Job((candidate,), canonicalize=False, neural=tmp_path)
        screen = Console(file=io.StringIO(), width=100)
        commands.detect_text(text, job, tokenizer=split, console=screen, level=0.01, prompt_tokens=prompt_tokens)
        return re.search("neural p = .*", screen.file.getvalue())[0]

    whole = " ".join(map(str, np.random.default_rng(4).integers(0, VOCAB, 60)))
    assert "4000 null scores" in said(whole, 40) and "first 20 tokens" in said(whole, 40)
    assert "first 0 tokens, 0 null scores" in said(whole, 60)


def test_parameters_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match="misshapen .*embed.embedding"):
        features.save(tmp_path, SHAPE, PARAMS | {"embed.embedding": np.zeros((2, 2))}, {})


def test_documents_stay_whole_when_human_text_is_split():
    from jaxbench.text.passages import Passages

    tokens = np.arange(16)[:, None].astype(np.int32)
    documents = np.repeat(np.arange(8), 2).astype(np.int32)
    parts = train_detector.split(Passages(tokens, documents))
    owners = [set(documents[part[:, 0]]) for part in parts]
    assert owners == [{0, 2, 4, 6}, {1, 5}, {3, 7}]
    with pytest.raises(ValueError, match="2 documents of human text"):
        train_detector.split(Passages(tokens[:4], documents[:4]))


def test_texts_and_lengths_of_training_batches_do_not_tell_the_label():
    scheme = config.parse_scheme("kgw")
    tokens, keys = marked(scheme, count=20)
    pools = [training_data.marked_pool(scheme, tokens, keys, vocab_size=VOCAB)]
    human = [training_data.human_pool(scheme, tokens[::-1] // 2, vocab_size=VOCAB)]
    random = np.random.default_rng(0)
    how = training_data.Example(min_tokens=8, max_edited=0.4, pasted_share=0.25)
    data = training_data.batch(pools, human, size=1200, example=how, random=random)
    is_marked = data.labels == 1
    lengths = (data.tokens >= 0).sum(axis=1)
    assert is_marked.mean() == 0.5
    assert lengths[is_marked].mean() == pytest.approx(lengths[~is_marked].mean(), abs=2.5)
    is_pool = np.arange(1200) < 900  # the rest is human text
    large = [(data.tokens[rows] > VOCAB // 2).mean() for rows in (is_marked & is_pool, ~is_marked & is_pool)]
    assert large[0] == pytest.approx(large[1], abs=0.02)
    assert data.evidence[is_marked][data.scored[is_marked]].mean() > 0.6
    assert data.evidence[~is_marked][data.scored[~is_marked]].mean() == pytest.approx(0.5, abs=0.01)


def test_training_finds_marks_of_a_scheme_and_keys_it_has_not_seen():
    learnt, unseen = config.parse_scheme("kgw"), config.parse_scheme({"scheme": "gumbel", "context": {"width": 2}})
    settings = train_detector.Training(
        train_schemes={"kgw": learnt}, test_schemes={"gumbel": unseen}, detector=SHAPE, steps=60, batch_size=32,
        learning_rate=1e-2, min_tokens=20, num_null=1000, test_lengths=(60,), test_edits=(), test_pasted=(),
    )  # fmt: skip
    tokens, keys = marked(learnt)
    human = train_detector.Corpus(*np.random.default_rng(9).integers(0, VOCAB, (3, 80, 60), dtype=np.int32))
    pools = [training_data.marked_pool(learnt, tokens, keys, vocab_size=VOCAB)]
    plain = [training_data.human_pool(learnt, human.train, vocab_size=VOCAB)]
    params, losses = train_detector.fit(settings, pools, plain)
    assert np.mean(losses[-10:]) < 0.4 * np.log(2)  # what a guess costs
    texts, keys = marked(unseen, seed=5, count=100, strength=0.5)
    scorer = neural_detection.Scorer(SHAPE, params)
    rows = train_detector.judge(settings, scorer, "gumbel", texts, keys, human, vocab_size=VOCAB)
    found = {(row["condition"], row["level"]): row["neural"]["value"] for row in rows}
    assert found["60 tokens", 0.01] > 0.8
    assert found["human text, held out", 0.01] < 0.03


def test_a_level_that_no_conformal_p_value_reaches_is_refused():
    how = {"train_schemes": {"a": {"scheme": "kgw"}}, "test_schemes": {"b": {"scheme": "dip"}}, "levels": (0.01, 1e-3)}
    with pytest.raises(ValueError, match="no p-value reaches level 0.001 with num_null=998; wanted at least 999"):
        train_detector.Training(**how, num_null=998)
    least = train_detector.Training(**how, num_null=999)
    assert neural_detection.conformal_p(np.ones(1), np.zeros(least.num_null))[0] <= min(least.levels)


def test_a_scheme_that_is_trained_on_is_no_test():
    settings = train_detector.Training(train_schemes={"a": {"scheme": "kgw"}}, test_schemes={"b": {"scheme": "kgw"}})
    with pytest.raises(ValueError, match=r"test schemes \['b'\] are also trained on"):
        train_detector.run(settings, workdir="nowhere")
