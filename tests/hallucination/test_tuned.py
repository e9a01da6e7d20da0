"""A reader whose upper blocks are tuned: what is read once below them, what is trained, and what is not."""

import contextlib

import jax
import numpy as np
import pytest

from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import (
    detect,
    encoding,
    linear,
    lower_reader,
    metrics,
    portable,
    ragtruth,
    saved_detector,
    tuned_inputs,
    tuned_reader,
    tuned_reading,
    tuned_sources,
    tuning,
)
from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination.group import Group
from jaxbench.hallucination.study import tuned
from jaxbench.lora.config import LoraConfig
from jaxbench.pretrained.tokenizer import load_tokenizer
from tests.hallucination import small

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "up_proj"))
TUNING = tuning.Tuning(first=1, num_blocks=2, lora=LORA, epochs=60, row_tokens=64, learning_rate=1e-2, dtype="float32")
RESPONSES = tuple(row[3] for row in small.RESPONSES[:3])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Return a random decoder of four blocks, its parameters and a tokenizer of bytes."""
    tokenizer = load_tokenizer(str(small.model(tmp_path_factory.mktemp("tuned"))))
    config = TransformerConfig(
        vocab_size=tokenizer.core.get_vocab_size(), d_model=32, d_ff=48, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=8, max_seq_len=256, tie_embeddings=True,
    )  # fmt: skip
    return config, initial.initial_params(config, 0, distinct=True), tokenizer


@pytest.fixture(scope="module")
def read(decoder, tmp_path_factory):
    """Return the rows of one source's responses, and the file that holds them."""
    config, params, tokenizer = decoder
    _, question, context = small.CONTEXTS["s1"]
    group = Group(context, question, RESPONSES, ("a", "b", "c"))
    path = tmp_path_factory.mktemp("sources") / "s1.safetensors"
    kept = {name: x for name, x in params.items() if not name.startswith("layers.3.")}
    whole = transformer.build(config.model_copy(update={"num_layers": 3}), kept)
    settings = small.settings(path, row_tokens=64)
    lower = tuned_reading.LowerReading(lower_reader.LowerReader(whole, first=1), tokenizer, 256, settings)
    tuning.write(path, lower.read(group), TUNING)
    return tuning.places(path, (0, 1, 2), TUNING)


def tuned_config(decoder):
    return tuned_inputs.TunedConfig(decoder=decoder[0], lora=LORA, first=1, num_blocks=2)


def test_without_training_it_reads_every_token_as_the_decoder_does(decoder, read):
    config, params, tokenizer = decoder
    start = tuned_inputs.starting_params(tuned_config(decoder), params, seed=0, rate=0.5)
    direction = np.random.default_rng(0).standard_normal((config.d_model, 1)).astype(np.float32)
    said = tuning.logits(tuned_config(decoder), {**start, "head.kernel": direction}, read, TUNING)
    kept = {name: x for name, x in params.items() if not name.startswith("layers.3.")}
    whole = transformer.build(config.model_copy(update={"num_layers": 3}), kept)
    _, question, context = small.CONTEXTS["s1"]
    prompt = encoding.encode_prompt(tokenizer, context, question, window=200).text.ids
    features = jax.jit(lambda tokens, positions: whole.features(tokens, positions)[0])
    for number, text in enumerate(RESPONSES):
        tokens = np.zeros((1, 192), np.int32)
        ids = [*prompt, *encoding.encode_response(tokenizer, text).ids]
        tokens[0, : len(ids)] = ids
        positions = np.where(np.arange(192) < len(ids), np.arange(192), -1)[None]
        wanted = np.asarray(features(tokens, positions))[0, len(prompt) : len(ids)] @ direction[:, 0]
        np.testing.assert_allclose(said[number], wanted, rtol=2e-4, atol=2e-4)


def test_training_moves_adapters_and_head_alone_and_finds_the_labelled_tokens(decoder, read):
    config, params, _ = decoder
    labels = [np.array([letter.isdigit() for letter in text]) for text in RESPONSES]
    start = tuned_inputs.starting_params(tuned_config(decoder), params, seed=0, rate=0.1)
    found = tuning.fit(tuned_config(decoder), start, read, labels, TUNING)
    adapters = 2 * 3 * 2  # of two blocks with three projections each
    assert len(found) == adapters + 2 and all(".lora_" in name or name in tuned_inputs.HEAD for name in found)
    assert all(np.abs(value - start[name]).max() > 0 for name, value in found.items())
    said = tuning.logits(tuned_config(decoder), {**start, **found}, read, TUNING)
    scores = np.concatenate([said[i] for i in range(3)])
    assert metrics.auc(np.concatenate(labels), scores) > 0.95


def test_a_row_that_fills_a_batch_changes_no_loss(decoder):
    config = tuned_config(decoder)
    model = tuned_reader.build(config, tuned_inputs.initial_params(config, 0, distinct=True))
    given = tuned_inputs.parity_arrays(config, batch=2, length=16, seed=0, step=0)
    empty = [np.concatenate([each, np.zeros_like(each)]) for each in given]
    loss = jax.jit(tuned_reader.loss_fn)
    plain, filled = (float(loss(model, tuned_reader.Batch(*arrays))) for arrays in (given, empty))
    assert filled == pytest.approx(plain, rel=1e-6)


def test_no_source_is_on_two_sides_of_a_split():
    source = np.array([f"s{i // 3}" for i in range(60)])
    labels = detectors.Labels(np.zeros(60, bool), np.zeros(0, bool), source)
    among = np.flatnonzero(~np.isin(source, ["s2", "s11"]))
    parts = tuned_sources.split(labels, among)
    sides = [set(source[part]) for part in parts]
    assert len(set.union(*sides)) == sum(map(len, sides)) == 18
    assert len(parts.weigh) < len(parts.train) / 2 and sum(map(len, parts)) == 54


def test_blocks_that_the_decoder_does_not_have_are_refused(decoder):
    with pytest.raises(ValueError, match="blocks 3 to 4 are wanted of a decoder of 4"):
        tuned_inputs.TunedConfig(decoder=decoder[0], lora=LORA, first=3, num_blocks=2)
    with pytest.raises(ValueError, match="lora.layers=.*wanted none"):
        tuned_inputs.TunedConfig(
            decoder=decoder[0], lora=LORA.model_copy(update={"layers": (0,)}), first=1, num_blocks=2
        )


# As a member of a detector


@pytest.fixture(scope="module")
def member(made, tmp_path_factory):
    """Return a folder's data, the lower files of its responses, and the file of a detector with a tuned reader."""
    folder, read, _, fitted, model = made
    data = ragtruth.load(folder / "data")
    workdir = tmp_path_factory.mktemp("member")
    lower = tuned_sources.Lower.of(workdir / "tuned", small.settings(model), TUNING.model_copy(update={"first": None}))
    tuned_sources.read(lower, data, processes=1, bar=quiet)
    parts = tuned_sources.Split(np.array([0, 1, 2]), np.array([3]))
    heard, others = tuned_sources.tune(lower, data, read.labels, parts, np.arange(0), bar=quiet)
    assert not others and list(heard.rows) == [3]
    weighing = linear.Linear(np.zeros(5), np.ones(5), np.array([0.5, 0.2, 0.1, 0.3, 0.4]), np.array(-0.1))
    detector = fitted._replace(tuned=detectors.Tuned(heard.config, heard.trained, weighing))
    path = workdir / "detector.safetensors"
    saved_detector.save(path, saved_detector.Saved(detector, small.settings(model), lower.model_sha256))
    return data, lower, path, detector


def quiet(total):
    return contextlib.nullcontext(lambda count: None)


def test_what_is_below_the_tuned_blocks_is_read_once(member, monkeypatch):
    data, lower, _, _ = member
    monkeypatch.setattr(tuned_sources.tuning, "write", lambda *given: pytest.fail("a file was written again"))
    tuned_sources.read(lower, data, processes=1, bar=quiet)
    other = lower._replace(settings=lower.settings.model_copy(update={"window": 200}))
    assert not {path for path, *_ in other.groups(data)} & {path for path, *_ in lower.groups(data)}


def test_finished_folds_are_not_those_of_other_data_or_code(member, tmp_path):
    lower = member[1]
    named = [(lower, "a"), (lower, "b"), (lower._replace(code="other"), "a")]
    assert len({tuned.kept(tmp_path, *each) for each in named}) == 3


def test_sources_of_the_same_texts_share_a_file_and_each_keeps_its_responses(member):
    data, lower, _, _ = member
    again = [
        response.model_copy(update={"id": f"{response.id}b", "source_id": "s9"}) for response in data.responses[:3]
    ]
    sources = data.sources | {"s9": data.sources["s1"]}
    doubled = data.model_copy(update={"sources": sources, "responses": (*data.responses, *again)})
    found = lower.groups(doubled)
    assert [members for _, _, members in found] == [(0, 1, 2), (3,), (4, 5, 6)] and found[0][0] == found[2][0]
    places = lower.places(doubled, np.arange(7))
    assert sorted(i for place in places for i in place.members) == list(range(7))


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_a_detector_in_use_hears_its_tuned_reader_as_an_evaluation_does(made, member, package):
    _, read, _, plain, model = made
    data, lower, path, detector = member
    said = tuned_sources.said(lower, data, saved_detector.load(path).detector.tuned)
    inputs = read.inputs.take(np.arange(4))
    wanted = detectors.judge(detector, inputs._replace(tuned=said)).probability
    in_use = detect.HallucinationDetector(path, model=model, package=package)
    for name in small.CONTEXTS:
        numbers = [i for i, row in enumerate(data.responses) if row.source_id == name]
        source = data.sources[name]
        together = in_use.detect_group(source.context, source.asked, [data.responses[i].response for i in numbers])
        alone = [in_use.detect(source.context, source.asked, data.responses[i].response) for i in numbers]
        for i, one, other in zip(numbers, together, alone):
            assert one.probability == pytest.approx(wanted[i], abs=2e-5)
            assert other.probability == pytest.approx(wanted[i], abs=2e-5)
    assert np.abs(wanted - detectors.judge(plain, inputs).probability).max() > 1e-3


def test_a_context_that_is_cut_is_cut_for_each_response_as_if_it_were_alone(made, member):
    _, _, path, detector = member
    model = made[4]
    settings = small.settings(model, window=90)
    reader = tuned_reading.load_reader(settings, detector.tuned.config, detector.tuned.trained, package="jaxbench")
    _, question, context = small.CONTEXTS["s1"]
    together = reader(Group(context, question, RESPONSES, ("a", "b", "c")))
    for text, said in zip(RESPONSES, together):
        np.testing.assert_allclose(said, reader(Group(context, question, (text,), ("a",)))[0], atol=1e-4)
    assert [len(each) for each in together] == [len(text.encode()) for text in RESPONSES]


def test_a_tuned_reader_is_weighed_by_what_it_says_of_responses_that_were_kept_from_it():
    random = np.random.default_rng(0)
    labels, source = np.arange(240) % 2 == 0, np.array([f"s{i // 6}" for i in range(240)])
    inputs = detectors.Inputs(
        {"lexical": random.random((240, 7))}, {"lexical": random.random((240, 7)), "place": random.random((240, 2))},
        np.arange(240),
    )  # fmt: skip
    members = {
        "response": detectors.Member(("lexical",), False, 1.0),
        "sentence": detectors.Member(("lexical", "place"), True, 1.0),
    }
    known = detectors.Labels(labels, labels, source)
    parts = tuned_sources.split(known, np.arange(240))
    said = [random.standard_normal(5) + 3.0 * label for label in labels]
    heard = detectors.Heard(None, {}, parts.weigh, [said[i] for i in parts.weigh])
    fitted = detectors.fit(inputs, known, members=members, tuned=heard)
    found = detectors.judge(fitted, inputs._replace(tuned=tuple(said))).probability
    plain = detectors.judge(fitted._replace(tuned=None), inputs).probability
    assert metrics.auc(labels[parts.train], found[parts.train]) > 0.95 > metrics.auc(labels, plain)
    assert 0.9 < metrics.f1(labels, found >= fitted.threshold)[0]


def test_a_tuned_reader_comes_back_from_its_file_and_a_part_that_is_missing_is_named(member, tmp_path):
    _, lower, path, detector = member
    loaded = saved_detector.load(path)
    assert loaded.detector.tuned.config == detector.tuned.config
    for name, value in detector.tuned.trained.items():
        np.testing.assert_array_equal(loaded.detector.tuned.trained[name], value)
    less = {name: value for name, value in detector.tuned.trained.items() if name != "head.bias"}
    with pytest.raises(ValueError, match="head.bias is None; wanted \\(1,\\)"):
        tuned_reading.load_reader(lower.settings, detector.tuned.config, less, package="jaxbench")
    with pytest.raises(ValueError, match="--format=onnx has the reader's programs alone.*wanted safetensors"):
        portable.write(tmp_path / "out", loaded, "onnx", model=lower.settings.model, package="torch_ref")
    with pytest.raises(ValueError, match="bits=4: a tuned reader stands on float weights"):
        tuned_sources.Lower.of(tmp_path, small.settings(lower.settings.model, bits=4), TUNING)
    damaged = tmp_path / "file.safetensors"
    damaged.write_bytes(lower.groups(ragtruth.load(small.write(tmp_path / "data")))[0][0].read_bytes()[:99])
    with pytest.raises(ValueError, match="cannot be read .*remove it"):
        tuning.load(damaged)
