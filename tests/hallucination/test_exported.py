"""A detector that was exported says what the detector says, in every runtime."""

import shutil

import numpy as np
import pytest

from jaxbench.hallucination import detect, extract, group, portable, saved_detector
from tests.hallucination import small

PACKAGES = {"onnx": "torch_ref", "stablehlo": "jaxbench", "safetensors": "jaxbench"}


@pytest.fixture(scope="module")
def folders(made, tmp_path_factory):
    _, _, path, _, model = made
    folder = tmp_path_factory.mktemp("exported")
    saved = saved_detector.load(path)
    for kind, package in PACKAGES.items():
        if kind == "onnx":
            pytest.importorskip("onnxscript", reason="the exporter of ONNX is not installed")
        portable.write(folder / kind, saved, kind, model=model, window=128, package=package)
    return folder


@pytest.mark.parametrize("kind", PACKAGES)
def test_an_exported_reader_has_the_same_features(made, folders, kind):
    _, _, path, _, model = made
    _, question, context = small.CONTEXTS["s1"]
    responses = tuple(row[3] for row in small.RESPONSES[:3])
    work = group.Group(context[:30], question, responses, ("a", "b", "c"))
    wanted = group.read_group(work, *extract.load_reader(small.settings(model), package="jaxbench"), small.settings(model))
    exported = detect.HallucinationDetector(folders / kind)
    assert exported.reader[2] == 128
    found = dict(group.read_group(work, *exported.reader, exported.settings))
    for key, features in wanted:
        assert set(features) == set(found[key])
        for name, value in features.items():
            np.testing.assert_allclose(found[key][name], value, rtol=1e-3, atol=1e-4, err_msg=f"{key} {name}")


@pytest.mark.parametrize("kind", PACKAGES)
def test_an_exported_detector_has_the_same_verdicts(made, folders, kind):
    _, _, path, _, model = made
    _, question, context = small.CONTEXTS["s1"]
    plain, exported = detect.HallucinationDetector(path, model=model), detect.HallucinationDetector(folders / kind)
    for row in small.RESPONSES[:2]:
        one, other = plain.detect(context, question, row[3]), exported.detect(context, question, row[3])
        assert other.probability == pytest.approx(one.probability, abs=1e-3)
        assert [part.is_flagged for part in other.sentences] == [part.is_flagged for part in one.sentences]
        assert [(span.start, span.end) for span in other.spans] == [(span.start, span.end) for span in one.spans]
        assert other.num_cut == one.num_cut


def test_a_longer_response_than_the_programs_take_is_refused(folders):
    exported = detect.HallucinationDetector(folders / "stablehlo")
    with pytest.raises(ValueError, match="response: 65 tokens, and the window of 128 takes 64"):
        exported.detect("The mill was built.", "", "a" * 65)


def test_a_damaged_folder_is_refused_and_named(folders, tmp_path):
    with pytest.raises(ValueError, match="holds no bundle"):
        detect.HallucinationDetector(tmp_path)
    with pytest.raises(ValueError, match="holds a reader of its own"):
        detect.HallucinationDetector(folders / "stablehlo", model="default")
    for kind, file in (("stablehlo", "scores.stablehlo"), ("onnx", "reader.onnx")):
        shutil.copytree(folders / kind, tmp_path / kind)
        (tmp_path / kind / file).write_bytes((tmp_path / kind / file).read_bytes()[:100])
        with pytest.raises(ValueError, match=str(tmp_path / kind)):
            _ = detect.HallucinationDetector(tmp_path / kind).reader
    shutil.copytree(folders / "stablehlo", tmp_path / "other")
    about = (tmp_path / "other" / "bundle.json").read_text().replace('"model_sha256": "', '"model_sha256": "0')
    (tmp_path / "other" / "bundle.json").write_text(about)
    with pytest.raises(ValueError, match="name that model, or fit a detector with this one"):
        detect.HallucinationDetector(tmp_path / "other")
