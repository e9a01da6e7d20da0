"""The command that serves: where its engine may compute, and what becomes of it without one."""

import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxbench.native import library
from jaxbench.serve.settings import EngineConfig, ServerConfig
from jaxbench.watermark import keys
from tests.generation import tiny
from tests.structure import ROOT

XLA = EngineConfig(kernels="xla")


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks an engine's settings beside flags."""
    check_place = runpy.run_path(str(ROOT / "experiments/serve.py"))["_check_place"]

    def check(engine, *, device, replicas=None):
        monkeypatch.setitem(check_place.__globals__, "VALUES", SimpleNamespace(device=device, replicas=replicas))
        check_place(engine)

    return check


def test_any_engine_computes_on_a_cpu_and_xlas_on_a_gpu(check):
    check(EngineConfig(), device="cpu", replicas=2)
    check(XLA, device="gpu")


@pytest.mark.parametrize(
    ("engine", "replicas", "wanted"),
    [
        (EngineConfig(), None, "engine.kernels=native, engine.backend=flax compute on the CPU"),
        (XLA.model_copy(update={"backend": "torch"}), None, "engine.kernels=xla, engine.backend=torch"),
        (XLA, 2, "--replicas=2: one engine a device"),
    ],
)
def test_what_does_not_go_on_a_gpu_is_refused_with_what_to_set(check, engine, replicas, wanted):
    with pytest.raises(ValueError, match=f"--device=gpu.*{wanted}"):
        check(engine, device="gpu", replicas=replicas)


def test_a_model_is_named_by_the_last_part_of_its_path_wherever_it_is_named_from(tmp_path, monkeypatch):
    folder = tmp_path / "small" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    names = {".": "inner", "..": "small", "../inner/": "inner", "../../link": "link", "org/model": "model"}
    assert {path: ServerConfig(engine={"model": path}).shown_name for path in names} == names
    assert ServerConfig().shown_name == "default"
    with pytest.raises(ValueError, match="name"):
        ServerConfig(name="")


@pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")
def test_a_server_whose_model_cannot_be_loaded_ends_with_the_reason(tmp_path):
    (tiny.make(tmp_path / "model") / "model.safetensors").unlink()
    words = [sys.executable, str(ROOT / "experiments/serve.py"), f"--model={tmp_path / 'model'}", "--set=port=0"]
    ended = subprocess.run([*words, "--set=engine.cache_tokens=256"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "missing model.safetensors" in ended.stderr.splitlines()[-1], ended.stderr


def test_a_file_is_not_resumed_with_another_key_under_the_same_name(tmp_path, monkeypatch):
    command = runpy.run_path(str(ROOT / "experiments/serve.py"))
    monkeypatch.setitem(command["_identity"].__globals__, "VALUES", SimpleNamespace(device="cpu"))
    named = {"team": {"scheme": {"scheme": "kgw"}, "key_file": str(tmp_path / "key")}}
    config = ServerConfig(engine={"model": str(tiny.make(tmp_path / "model")), "watermarks": named})

    def identity(key):
        (tmp_path / "key").unlink(missing_ok=True)
        keys.write_key_file(tmp_path / "key", keys.Key(key))
        return command["_identity"](config, command["_watermarks"](config.engine))

    assert identity(17) == identity(17) != identity(18)


def test_a_file_is_resumed_with_another_cache_only_where_that_refuses_the_same(tmp_path, monkeypatch):
    command = runpy.run_path(str(ROOT / "experiments/serve.py"))
    monkeypatch.setitem(command["_identity"].__globals__, "VALUES", SimpleNamespace(device="cpu"))
    model = str(tiny.make(tmp_path / "model", max_seq_len=1024))

    def identity(**engine):
        return command["_identity"](ServerConfig(engine={"model": model} | engine), None)

    assert identity(cache_tokens=1024) == identity(cache_tokens=4096) != identity(cache_tokens=512)
    few = {"max_running": 2, "max_batch_tokens": 64}
    assert identity() == identity(limits=few) != identity(limits=few | {"max_waiting": 0})  # a request of 3 answers
