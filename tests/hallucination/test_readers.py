"""Readers of few bits, and the study of what they cost: integers in memory, features of what they stand for."""

import importlib
import json

import numpy as np
import pytest

from jaxbench.hallucination import detector, extract, group, linear, portable, ragtruth, saved_detector
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.study import readers, table
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.quantization import quantize
from jaxbench.quantization.recipe import dequantized
from tests.hallucination import small


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small.model(tmp_path_factory.mktemp("readers") / "model")


def features(reader, settings, tokenizer, window=128):
    _, question, context = small.CONTEXTS["s1"]
    responses = tuple(row[3] for row in small.RESPONSES[:2])
    return dict(
        group.read_group(
            group.Group(context[:40], question, responses, ("a", "b")), reader, tokenizer, window, settings
        )
    )


@pytest.fixture(scope="module")
def rounded(model):
    """Return features of a float reader whose weights are what two bits stand for."""
    settings, checkpoint = small.settings(model, bits=2), weights.load_checkpoint(model)
    params = dequantized(quantize.quantize(checkpoint.config, checkpoint.params, settings.recipe))
    floats = importlib.import_module("torch_ref.transformer").build(checkpoint.config, params, dtype="float32")
    made = importlib.import_module("torch_ref.hallucination.features").FeatureReader(floats, state_layer=0)
    return features(made, settings, load_tokenizer(model)), made.weight_bytes, params


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_a_reader_of_two_bits_holds_integers_and_reads_as_the_floats_they_stand_for(model, rounded, package):
    settings = small.settings(model, bits=2)
    expected, float_bytes, params = rounded
    made, tokenizer, window = extract.load_reader(settings, package=package)
    found = features(made, settings, tokenizer, window)
    for key, wanted in expected.items():
        for name, value in wanted.items():
            tolerance = 2e-3 if value.dtype == np.float16 else 5e-5
            np.testing.assert_allclose(found[key][name], value, atol=tolerance, err_msg=f"{key} {name}")
    matrices = sum(value.size for name, value in params.items() if name.startswith("layers.") and value.ndim == 2)
    # 32 weights that share a scale and a least weight: 8 bytes of codes and 4 of these, in place of 128
    assert made.weight_bytes == float_bytes - 4 * matrices + matrices * 12 // 32


def test_features_keep_their_names_where_weights_stay_floats(model):
    plain, item = small.settings(model), extract.Item("A mill.", "when", "In 1820.")
    given = plain.identity()
    assert "bits" not in given and "recipe" not in given
    names = {extract.Store(".", small.settings(model, **changes), "m").key(item) for changes in ({}, {"bits": None})}
    assert len(names) == 1
    names |= {extract.Store(".", small.settings(model, bits=bits), "m").key(item) for bits in (2, 3, 4, 8)}
    assert len(names) == 5


def test_a_detector_says_how_many_bits_its_reader_has_and_refuses_others(made, tmp_path):
    _, _, path, _, model = made
    saved = saved_detector.load(path)
    few = saved._replace(settings=saved.settings.model_copy(update={"bits": 4}))
    saved_detector.save(tmp_path / "few", few)
    again = saved_detector.load(tmp_path / "few")
    assert again.settings.bits == 4 and saved.settings.bits is None
    saved_detector.check_settings(again, ReaderSettings(), ())
    saved_detector.check_settings(again, ReaderSettings(bits=4), ("bits",))
    saved_detector.check_settings(again, ReaderSettings(row_tokens=64), ("row_tokens",))  # which decide no feature
    with pytest.raises(ValueError, match="fitted to a reader of bits=4, and the settings say bits=2"):
        saved_detector.check_settings(again, ReaderSettings(bits=2), ("bits",))
    with pytest.raises(ValueError, match="bits=None, and the settings say bits=4"):
        saved_detector.check_settings(saved, ReaderSettings(bits=4), ("bits",))
    with pytest.raises(ValueError, match="onnx has float weights, and the detector's reader bits=4"):
        portable.write(tmp_path / "out", few, "onnx", model=model, window=128, package="torch_ref")


# The study


def write(folder, num=24):
    """Write a folder of sources in two tasks, every third in the split `dev`, each with a right and a wrong answer."""
    folder.mkdir()
    sources, responses = [], []
    for i in range(num):
        year, name = 1800 + 7 * i, ("Reed", "Anna", "Holm")[i % 3]
        context = f"The mill was built in {year} by {name}."
        sources.append({"source_id": f"s{i}", "task": ragtruth.TASKS[i % 2], "question": "when", "context": context})
        for j, text in enumerate((f"It was built in {year}.", f"It was built in {year + 50}.")):
            label = {"start": 16, "end": 20, "label_type": "Evident Conflict"}
            row = {"id": f"r{i}.{j}", "source_id": f"s{i}", "model": "one", "response": text, "labels": [label] * j}
            responses.append(row | {"split": ("dev", "train", "test")[i // 2 % 3]})
    for name, rows in (("sources", sources), ("responses", responses)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_sources_are_drawn_over_tasks_from_one_split_and_by_the_seed_alone(tmp_path):
    data = ragtruth.load(write(tmp_path / "data"))
    given = readers.drawn(data, "dev", 6, seed=3)
    splits = {row.source_id: row.split for row in data.responses}
    assert {splits[name] for name in given} == {"dev"}
    assert sorted(data.sources[name].task for name in given) == ["QA"] * 3 + ["Summary"] * 3
    assert given == readers.drawn(data, "dev", 6, seed=3) != readers.drawn(data, "dev", 6, seed=4)
    with pytest.raises(ValueError, match="--sources=9: the split dev has 8"):
        readers.drawn(data, "dev", 9, seed=3)


def test_a_lens_on_fewer_tokens_is_taken_out_of_that_on_all(model, tmp_path):
    tokenizer, found = load_tokenizer(model), []
    exact = small.settings(model, lens_tokens=None)
    reader = extract.load_reader(exact, package="torch_ref").feature_reader
    store = extract.Store(tmp_path, exact, "m")
    for key, each in features(reader, exact, tokenizer).items():
        store.write(key, each)
    for key, each in features(reader, small.settings(model, lens_tokens=4), tokenizer).items():
        taken = readers.Thinned(store, 4).read(key)
        np.testing.assert_array_equal(taken["parametric_slots"], each["parametric_slots"])
        np.testing.assert_allclose(taken["parametric"], each["parametric"], atol=1e-6)
        found.append(len(taken["parametric"]))
    assert found == [4, 4] and len(store.read("a")["parametric"]) > 4


def test_forms_that_nobody_knows_are_named():
    assert readers.wanted_forms(["2_bits", "bfloat16"]) == ["bfloat16", "2_bits"]
    with pytest.raises(ValueError, match="--forms: '5_bits' is none of bfloat16, "):
        readers.wanted_forms(["5_bits"])


def test_a_form_is_read_on_the_clock_in_a_process_of_its_own_and_judged_as_the_detector_stands(made, tmp_path):
    folder, read, _, fitted, model = made
    data, settings = ragtruth.load(folder / "data"), small.settings(model)
    study = readers.Study(settings, weights.checksum(model), data, ("s1",), folder / "features", tmp_path)
    found = readers.cost(study, "2_bits", num_sources=1)
    texts = [row[3] for row in small.RESPONSES[:3]]
    assert found["responses"] == 3 and found["tokens"] == sum(map(len, texts))
    assert found["peak_bytes"] > found["weight_bytes"] > 0 and found["load_cpu_s"] > 0
    assert found["responses_a_core_minute"] == pytest.approx(180 / found["cpu_s"])
    few = study.form("2_bits")
    assert few.bits == 2 and extract.groups(readers.items(study.part(True)), study.store(few)) == []
    x, labels = read.inputs.whole["parametric"], read.labels.response
    judges = (fitted, linear.fit(x, labels, strength=1.0))
    expected = detector.judge(fitted, read.inputs.take(np.arange(3))).probability
    plain, rounded = (readers.scores(study, name, judges)["detector"] for name in ("float32", "2_bits"))
    np.testing.assert_allclose(plain, expected, atol=1e-6)
    assert np.abs(np.subtract(plain, rounded)).max() > 1e-3


def test_forms_are_compared_with_the_first_one_on_the_same_draws(tmp_path):
    given = table.make(ragtruth.load(write(tmp_path / "data")), None)
    labels, noise = given.labels.response, np.random.default_rng(0).random(len(given.labels.response))
    said = {"bfloat16": labels + noise / 2, "2_bits": np.zeros(len(labels)), "lens_1": labels + noise / 3}
    by_form = {name: {"detector": each, "parametric": -each} for name, each in said.items()}
    found = readers.compared(given, by_form, draws=100, seed=0)
    assert found["bfloat16"]["pooled"] == [1, 1, 1] and found["lens_1"]["pooled_gain"] == [0, 0, 0]
    assert found["2_bits"]["pooled_gain"] == [-0.5] * 3 == found["2_bits"]["stratified_gain"]
    assert found["2_bits"]["parametric_gain"] == [0.5] * 3  # the first one's has every response on the wrong side
    costs = {"weight_bytes": 3e6, "peak_bytes": 5e6, "cpu_s_a_response": 2.0, "responses_a_core_minute": 30.0}
    shown = readers.shown({name: costs | row for name, row in found.items()})
    assert [row[0] for row in shown][0] == "2_bits" and shown[0][1:6] == (
        "3", "5", "2.00", "30.0", "0.500 -0.500 [-0.500, -0.500]",
    )  # fmt: skip


def test_forms_are_not_read_before_the_first_one_has_read_everything(model, tmp_path):
    data = ragtruth.load(small.write(tmp_path / "data"))
    study = readers.Study(small.settings(model), "m", data, ("s1",), tmp_path / "features", tmp_path)
    assert [row.id for row in study.part(True).responses] == ["r1", "r2", "r3"]
    assert [row.id for row in study.part(False).responses] == ["r4"]
    again = data.sources["s2"].model_copy(update={"context": data.sources["s1"].context})  # another question about it
    same = study._replace(data=data.model_copy(update={"sources": data.sources | {"s2": again}}))
    assert len(same.part(True).responses) == 3 and same.part(False).responses == ()
    assert [study.reading(name).lens_tokens for name in ("lens_4", "lens_all", "2_bits")] == [None, None, 3]
    with pytest.raises(ValueError, match="features of 4 of 4 responses are not in .*run `hallucination.py features`"):
        readers.check_features(study)


def test_finished_results_are_not_those_of_other_data(model, tmp_path):
    found = {readers.kept(tmp_path, small.settings(model), "m", ("s1",), measured=1, data_sha256=data) for data in "ab"}
    assert len(found) == 2
