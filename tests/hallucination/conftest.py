"""A small fitted detector, made once."""

import functools

import numpy as np
import pytest

from jaxbench.hallucination import detector, extract, ragtruth, saved_detector, token_inputs, token_training
from jaxbench.hallucination.study import table
from jaxbench.pretrained import weights
from tests.hallucination import small


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a folder of responses, its table, and the file of a detector that was fitted to six copies of it."""
    folder = tmp_path_factory.mktemp("detect")
    model = small.model(folder / "model")
    settings = small.settings(model)
    data = ragtruth.load(small.write(folder / "data"))
    store = extract.Store(folder / "features", settings, weights.checksum(str(model)))
    load = functools.partial(extract.load_reader, package="jaxbench")
    worker = extract.Worker(settings, store, load)
    list(extract.run(extract.groups(small.items(folder / "data"), store), worker))
    read = table.make(data, store)
    rows = np.tile(np.arange(len(data.responses)), 6)
    inputs = read.inputs.take(np.arange(len(data.responses)))
    repeated = detector.Inputs(
        {name: values[rows] for name, values in inputs.whole.items()},
        {name: np.tile(values, (6, 1)) for name, values in inputs.parts.items()},
        np.concatenate([inputs.response + len(data.responses) * i for i in range(6)]),
        inputs.tokens * 6,
    )
    source = np.array([f"{name} {i}" for i in range(6) for name in read.labels.source])
    labels = detector.Labels(read.labels.response[rows], np.tile(read.labels.part, 6), source, read.labels.tokens * 6)
    fitted = token_training.fit_detector(repeated, labels, token_inputs.Training(learning_rate=0.01, epochs=8))
    path = folder / "detector.safetensors"
    saved_detector.save(path, saved_detector.Saved(fitted, settings, weights.checksum(str(model))))
    return folder, read, path, fitted, str(model)
