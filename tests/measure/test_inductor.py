"""Whether torch.compile can build code here: a compiler, and no space in a path that it would not quote."""

import tempfile

import pytest

from jaxbench.measure import inductor


@pytest.fixture
def usable(monkeypatch, tmp_path):
    """Give a machine with a compiler, whatever this one has, and folders without spaces."""
    monkeypatch.setattr(inductor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: Spec("/opt/torch/__init__.py"))
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.delenv(inductor.CACHE, raising=False)


class Spec:
    """What the import system says of a package."""

    def __init__(self, origin):
        self.origin = origin


def test_a_machine_with_a_compiler_is_usable_and_a_gpu_needs_none(usable, monkeypatch):
    assert inductor.unusable("cpu") == ""
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    assert inductor.unusable("cpu") == "torch.compile needs a C++ compiler (g++, clang++, c++), none is on the PATH"
    assert inductor.unusable("gpu") == ""


def test_a_space_in_a_path_that_inductor_does_not_quote_is_named(usable, monkeypatch):
    monkeypatch.setenv(inductor.CACHE, "/home/me/my work/cache")
    assert "TORCHINDUCTOR_CACHE_DIR is /home/me/my work/cache; move it" in inductor.unusable("cpu")
    monkeypatch.setenv(inductor.CACHE, "/home/me/cache")
    assert inductor.unusable("cpu") == ""
    monkeypatch.setattr(tempfile, "tempdir", "/my tmp")
    assert "the folder of temporary files is /my tmp" in inductor.unusable("cpu")
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: Spec("/my envs/torch/__init__.py"))
    assert "PyTorch is /my envs/torch/__init__.py" in inductor.unusable("cpu")
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert inductor.unusable("cpu") == ""
