"""The command that serves: where its engine may compute."""

import runpy
from types import SimpleNamespace

import pytest

from jaxbench.serve.settings import EngineConfig
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
