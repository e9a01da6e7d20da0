"""What tests of whole runs share."""

import pytest


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Keep tokenized texts where no other test finds them."""
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path):
    """Return the path of a short text."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; " * 30)
    return path
