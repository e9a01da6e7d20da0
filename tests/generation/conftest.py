"""One tiny model for the tests of a file."""

from __future__ import annotations

import pytest

from jaxbench.pretrained import tokenizer
from tests.generation import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(folder):
    return tokenizer.load_tokenizer(folder)


@pytest.fixture(scope="module")
def flax(folder):
    return tiny.load(folder)
