"""Features of many responses into a cache by content, on several processes, resumable (S file).

A response's features are one file, named by the hash of everything that decides them: the model, how it reads, the
texts, the code. So nothing is computed twice, whatever order, split or run it comes in, and a killed run goes on.
The backend's FeatureReader comes in as a function.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from safetensors.numpy import load_file, save_file

from jaxbench import config, outputs
from jaxbench.hallucination import encoding, layout

CODE = ("encoding.py", "layout.py", "reader.py", "token_scores.py", "features.py", "extract.py")


class ReaderSettings(config.Base):
    """How a decoder reads: what decides a response's features beside the texts."""

    model: str | None = None  # GGUF file, Hugging Face folder or hub id; None = the default model
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # weights and products
    style: Literal["plain", "chat"] = "plain"  # the text around the context
    share: float = pydantic.Field(default=0.1, gt=0, le=1)  # of the context's tokens, those that count as attended to
    lens_tokens: int | None = pydantic.Field(default=8, gt=0)  # of a response, with parametric scores; None = all
    window: int | None = pydantic.Field(default=None, gt=1)  # tokens of prompt and response; None = the model's
    state_layer: int | None = pydantic.Field(default=None, ge=0)  # whose output is kept; None = two thirds of the way
    row_tokens: int = pydantic.Field(default=512, gt=0)  # slots that responses to one prompt share

    def layer(self, num_layers: int) -> int:
        """The block whose output is kept.

        Raises:
          ValueError: the model has no such block.
        """
        layer = 2 * num_layers // 3 if self.state_layer is None else self.state_layer
        if layer >= num_layers:
            raise ValueError(f"state_layer={layer}: the model has {num_layers} blocks, counted from 0")
        return layer


class Item(NamedTuple):
    """A response and what it should rest on."""

    context: str
    question: str
    response: str


class Group(NamedTuple):
    """Responses to one prompt, and the names of their files."""

    context: str
    question: str
    responses: tuple[str, ...]
    keys: tuple[str, ...]


def code_version() -> str:
    """Hash of the code that decides features; comments and docstrings are not part of it."""
    digest = hashlib.sha256()
    for name in CODE:
        tree = ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


class Store:
    """The cache: a folder with one file a response."""

    def __init__(self, folder: str | Path, settings: ReaderSettings, model_sha256: str):
        self.folder = Path(folder)
        identity = settings.model_dump(exclude={"model", "row_tokens"}) | {"model": model_sha256}
        self._identity = json.dumps(identity | {"code": code_version()}, sort_keys=True)

    def key(self, item: Item) -> str:
        """Name of a response's features."""
        return hashlib.sha256(json.dumps([self._identity, *item]).encode()).hexdigest()

    def path(self, key: str) -> Path:
        """File of a response's features."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """True where features are there."""
        return self.path(key).is_file()

    def write(self, key: str, features: dict[str, np.ndarray]) -> None:
        """Keep features, whole or not at all."""
        with outputs.whole(self.path(key)) as temporary:
            save_file({name: np.ascontiguousarray(value) for name, value in features.items()}, temporary)

    def read(self, key: str) -> dict[str, np.ndarray]:
        """Features of a response.

        Raises:
          ValueError: their file is damaged.
        """
        try:
            return load_file(self.path(key))
        except Exception as error:  # safetensors raises its own type and OSError
            raise ValueError(f"{self.path(key)}: cannot be read ({error}); remove it, and it is made again") from error


def groups(items: Iterable[Item], store: Store) -> list[Group]:
    """Responses that have no features yet, by prompt: the longest work first, so that processes end together."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for item in items:
        if not store.has(key := store.key(item)):
            found.setdefault((item.context, item.question), {})[key] = item.response
    made = [Group(*prompt, tuple(each.values()), tuple(each)) for prompt, each in found.items()]
    return sorted(made, key=lambda group: -len(group.context) - 2 * sum(map(len, group.responses)))


class Worker:
    """Reads groups; each process works with a copy of its own, which loads its model at the first group."""

    def __init__(self, settings: ReaderSettings, store: Store, load: Callable[[ReaderSettings], Any]):
        """load: settings -> a backend's reader, its tokenizer and its window in tokens (load_reader)."""
        self.settings, self.store, self._load = settings, store, load
        self._loaded: Any = None

    def __call__(self, group: Group) -> int:
        """Write the features of a group's responses; the number of them."""
        if self._loaded is None:
            self._loaded = self._load(self.settings)
        for key, features in read_group(group, *self._loaded, self.settings):
            self.store.write(key, features)
        return len(group.keys)


def read_group(
    group: Group, reader: Any, tokenizer: Any, window: int, settings: ReaderSettings
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the features of each response of a group, by key.

    Of R tokens: external, context_mass, lookback [L N R] in float16; loss, entropy, loss_without, entropy_without [R];
    states [R D] in float16; offsets [R 2], characters of the tokens; parametric_slots [M] and parametric [M L];
    num_cut [], tokens of the context that did not fit the window.

    Raises:
      ValueError: a response is longer than the window.
    """
    responses = [encoding.encode_response(tokenizer, response) for response in group.responses]
    longest = max(len(response.ids) for response in responses)
    if longest > window // 2:
        raise ValueError(f"response: {longest} tokens, and the window of {window} takes {window // 2}; cut it in parts")
    prompt = encoding.encode_prompt(
        tokenizer, group.context, group.question, window=window - longest, style=settings.style
    )
    ids = [response.ids for response in responses]
    rows = layout.pack([len(each) for each in ids], settings.row_tokens)
    given = [layout.prompt_arrays([text], share=settings.share) for text in (prompt.text, prompt.without)]
    read, read_without = (reader.read_prompt(arrays) for arrays in given)
    for row in rows:
        packed = [ids[i] for i in row]
        arrays = layout.response_arrays([prompt.text], [packed])
        places = layout.places(packed)
        slots = [place.start + lens_slots(len(each), settings.lens_tokens) for place, each in zip(places, packed)]
        padded = np.zeros(arrays.tokens.size, np.int32)
        padded[: sum(map(len, slots))] = np.concatenate(slots)
        found = reader.scores(read, given[0], arrays, padded, sum(map(len, slots)))
        bare = layout.response_arrays([prompt.without], [packed], size=arrays.tokens.shape[1])
        without = reader.surprise(read_without, bare)
        used = 0
        for i, place, mine in zip(row, places, slots):
            features = _of_response(found, without, place)
            features["parametric_slots"] = (mine - place.start).astype(np.int32)
            features["parametric"] = found["parametric"][used : used + len(mine)].astype(np.float32)
            features["offsets"] = np.array(responses[i].offsets, np.int32)
            features["num_cut"] = np.array(prompt.num_cut, np.int32)
            used += len(mine)
            yield group.keys[i], features


def _of_response(found: dict[str, np.ndarray], without: dict[str, np.ndarray], place: slice) -> dict[str, np.ndarray]:
    """Features of one response of a single row."""
    heads = {name: found[name][:, :, 0, place].astype(np.float16) for name in ("external", "context_mass", "lookback")}
    plain = {name: found[name][0, place].astype(np.float32) for name in ("loss", "entropy")}
    plain |= {f"{name}_without": value[0, place].astype(np.float32) for name, value in without.items()}
    return heads | plain | {"states": found["states"][0, place].astype(np.float16)}


def lens_slots(length: int, wanted: int | None) -> np.ndarray:
    """Tokens of a response whose parametric scores are computed: evenly spread; None = all."""
    if wanted is None or wanted >= length:
        return np.arange(length)
    return ((np.arange(wanted) + 0.5) * length / wanted).astype(np.int64)


def load_reader(settings: ReaderSettings, *, package: str) -> tuple[Any, Any, int]:
    """A backend's FeatureReader, the tokenizer, and the window in tokens.

    package: whose modules read: that of JAX or of PyTorch.

    Raises:
      ValueError: the model cannot be a reader, or the window is longer than what it was trained on.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    names = ("transformer", "hallucination.reader", "hallucination.features")
    transformer, reader, features = (importlib.import_module(f"{package}.{name}") for name in names)
    checkpoint = weights.load_checkpoint(settings.model)
    reader.check(checkpoint.config)
    longest = checkpoint.config.max_seq_len
    if settings.window is not None and settings.window > longest:
        raise ValueError(f"window={settings.window}: the model was trained on {longest} tokens")
    model = transformer.build(checkpoint.config, checkpoint.params, dtype=settings.dtype)
    made = features.FeatureReader(model, state_layer=settings.layer(checkpoint.config.num_layers))
    return made, load_tokenizer(settings.model), settings.window or longest


def run(work: Sequence[Group], worker: Worker, *, processes: int = 1) -> Iterator[int]:
    """Yield the number of responses of each finished group."""
    from jaxbench import worker_pool

    return worker_pool.results(worker, work, processes=processes) if processes > 1 else map(worker, work)
