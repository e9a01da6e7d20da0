"""Extract features of many responses into a content-addressed cache, in several processes, resumable (S file).

A response's features are one file, named by the hash of everything that determines them: the model, the settings, the
texts, the code. So nothing is computed twice, in whatever order, split or run it comes, and a killed run resumes.
The caller passes in a function that loads the backend's FeatureReader.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxbench import outputs, worker_pool
from jaxbench.hallucination.group import Group, LoadedReader, read_group
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.response_features import ResponseFeatures
from jaxbench.hallucination.where import Where

CODE = (
    "encoding.py", "layout.py", "reader.py", "token_scores.py", "features.py", "group.py", "reader_settings.py",
)  # fmt: skip


class Item(NamedTuple):
    """A response, with the context and question it answers."""

    context: str
    question: str
    response: str


def code_version(names: Sequence[str] = CODE) -> str:
    """Hash of the code that determines features, without comments and docstrings."""
    digest = hashlib.sha256()
    for name in names:
        tree = ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


class Store:
    """The cache: a folder with one file per response."""

    def __init__(self, folder: str | Path, settings: ReaderSettings, model_sha256: str):
        self.folder = Path(folder)
        identity = settings.identity() | {"model": model_sha256}
        self._identity = json.dumps(identity | {"code": code_version()}, sort_keys=True)

    def key(self, item: Item) -> str:
        """Return the cache key of a response's features."""
        return hashlib.sha256(json.dumps([self._identity, *item]).encode()).hexdigest()

    def path(self, key: str) -> Path:
        """Return the path of a response's features."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """True if features are in the cache."""
        return self.path(key).is_file()

    def write(self, key: str, features: ResponseFeatures) -> None:
        """Write features, atomically."""
        outputs.save_tensors(self.path(key), {name: np.ascontiguousarray(value) for name, value in features.items()})

    def read(self, key: str) -> ResponseFeatures:
        """Read the features of a response.

        Raises:
          ValueError: their file is damaged.
        """
        try:
            return load_file(self.path(key))
        except Exception as error:  # safetensors raises its own type and OSError
            raise ValueError(f"{self.path(key)}: cannot be read ({error}); remove it, and it is made again") from error


def num_with_cut_context(items: Iterable[Item], store: Store) -> int:
    """Number of responses, of those in the cache, whose context did not fit the reader's window and lost its end.

    Raises:
      ValueError: a file is damaged.
    """
    count = 0
    for path in map(store.path, map(store.key, items)):
        try:
            with safe_open(path, framework="np") as file:  # one number, not the whole file
                count += file.get_tensor("num_cut").item() > 0
        except Exception as error:  # safetensors raises its own type and OSError
            raise ValueError(f"{path}: cannot be read ({error}); remove it, and it is made again") from error
    return count


def groups(items: Iterable[Item], store: Store) -> list[Group]:
    """Group responses without features by prompt: the longest work first, so that processes finish together."""
    missing = (item for item in items if not store.has(store.key(item)))
    return sorted(by_prompt(missing, store), key=lambda group: -len(group.context) - 2 * sum(map(len, group.responses)))


def by_prompt(items: Iterable[Item], store: Store) -> list[Group]:
    """Group responses by prompt, in the order of the prompts' first responses."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for item in items:
        found.setdefault((item.context, item.question), {})[store.key(item)] = item.response
    return [Group(*prompt, tuple(each.values()), tuple(each)) for prompt, each in found.items()]


class Worker:
    """A worker that reads groups; every process has its own copy, which loads the model at its first group."""

    def __init__(self, settings: ReaderSettings, store: Store, load: Callable[[ReaderSettings], LoadedReader]):
        """load: such as load_reader."""
        self.settings, self.store, self._load = settings, store, load
        self._loaded: LoadedReader | None = None

    def __call__(self, group: Group) -> int:
        """Write the features of a group's responses; return how many there are."""
        if self._loaded is None:
            self._loaded = self._load(self.settings)
        for key, features in read_group(group, *self._loaded, self.settings):
            self.store.write(key, features)
        return len(group.keys)


def load_reader(settings: ReaderSettings, *, package: str, where: Where | None = None) -> LoadedReader:
    """Load a backend's reader: the first of load_readers."""
    return load_readers(settings, package=package, where=where)[0]


def load_readers(settings: ReaderSettings, *, package: str, where: Where | None = None) -> list[LoadedReader]:
    """Load one reader per device, as load_reader: each holds all weights, and they may read concurrently in threads.

    package: whose modules run, JAX's or PyTorch's. where: None = one device, the backend's choice.

    Raises:
      ValueError: the model cannot be a reader, the window is longer than what it was trained on, or `where` names more
        devices or blocks than there are, or memory that the device lacks.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    names = ("hallucination.reader", "hallucination.features", "hallucination.placement")
    reader, features, placement = (importlib.import_module(f"{package}.{name}") for name in names)
    devices = None if where is None else placement.devices(where.device, where.devices)
    checkpoint = weights.load_checkpoint(settings.model)
    reader.check(checkpoint.config)
    longest = checkpoint.config.max_seq_len
    if settings.window is not None and settings.window > longest:
        raise ValueError(f"window={settings.window}: the model was trained on {longest} tokens")
    with placement.in_host_memory() if devices else contextlib.nullcontext():
        model = decoder(settings, checkpoint.config, checkpoint.params, package=package)
    models = [model]
    if where is not None:
        models = [placement.placed(model, device, offload_layers=where.offload_layers) for device in devices]
    layer = settings.layer(checkpoint.config.num_layers)
    made = [features.FeatureReader(each, state_layer=layer) for each in models]
    return [LoadedReader(each, load_tokenizer(settings.model), settings.window or longest) for each in made]


def decoder(settings: ReaderSettings, config: Any, params: Mapping[str, np.ndarray], *, package: str) -> Any:
    """Build a backend's decoder with a model's weights as floats, or its blocks' matrices as integers.

    Raises:
      ValueError: the matrices cannot be stored as integers.
    """
    if settings.recipe is None:
        return importlib.import_module(f"{package}.transformer").build(config, params, dtype=settings.dtype)
    from jaxbench.quantization import quantize

    weight_only = importlib.import_module(f"{package}.quantization.weight_only")
    return weight_only.build(quantize.quantize(config, params, settings.recipe), dtype=settings.dtype)


def run(work: Sequence[Any], worker: Callable[[Any], int], *, processes: int = 1) -> Iterator[int]:
    """Run a worker, such as Worker, on every item; yield what it returns of each: how many responses were read."""
    return worker_pool.results(worker, work, processes=processes) if processes > 1 else map(worker, work)


def run_by_device(
    work: Sequence[Group], settings: ReaderSettings, store: Store, *, package: str, where: Where
) -> Iterator[int]:
    """Read groups on all devices of this process at once, each group on one of them; yield as `run`."""
    if work:
        readers = load_readers(settings, package=package, where=where)
        workers = [Worker(settings, store, lambda _, each=each: each) for each in readers]
        yield from worker_pool.by_threads(workers, work)
