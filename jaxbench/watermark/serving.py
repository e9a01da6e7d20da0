"""Watermarks of a server, per request: one step may mix texts with different keys and without a key (S file).

Provides what jaxbench/serve/marking.py needs. Clients send the name of a key; the key itself stays in a file on the
server. Schemes that draw run after temperature, filters and grammar; others change the logits before these, as
processors of sample.Generator do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from jaxtyping import Float

from jaxbench import yaml_files
from jaxbench.config import Base
from jaxbench.result_cache import ResultCache
from jaxbench.serve.request import Request, Sampling
from jaxbench.watermark import config, detection, identify, score_cache
from jaxbench.watermark.green_lists import lists_of
from jaxbench.watermark.keys import Key, key_of
from jaxbench.watermark.reference import MAX_WIDTH
from jaxbench.watermark.texts import Ragged, TextEncoder

Array = np.ndarray


class WatermarkKey(Base):
    """A scheme and its key file (`watermark.py keygen`; schemes whose key is one of their fields need none)."""

    scheme: config.Scheme
    key_file: str | None = None

    def read(self, name: str) -> Key:
        """Read the key.

        Raises:
          ValueError: the scheme needs a key and no file is named, or the file holds none.
        """
        missing = f"watermarks.{name}.key_file is missing; make a key with `watermark.py keygen`"
        return key_of(self.scheme, self.key_file, missing=missing)


def read_watermarks(path: str) -> tuple[identify.Candidate, ...]:
    """Read candidates from a YAML file of named schemes and key files, or from a server's configuration with them.

    Raises:
      ValueError: the file cannot be read or names none, or as Watermarks.
    """
    content = yaml_files.read(Path(path))
    engine = content.get("engine")
    named = engine.get("watermarks", {}) if isinstance(engine, dict) else engine if "engine" in content else content
    if not isinstance(named, dict) or not all(isinstance(fields, dict) for fields in named.values()) or not named:
        raise ValueError(f"--watermarks={path} names {str(named)[:60]}; wanted NAME: {{scheme: .., key_file: ..}}, ..")
    if odd := [name for name in named if not isinstance(name, str)]:
        kind = type(odd[0]).__name__
        raise ValueError(f"--watermarks={path} names {odd[0]!r}, which YAML takes for a {kind}; put it in quotes")
    return Watermarks(named, package="jaxbench").candidates()


class Marker:
    """Marks one text; called once per token."""

    def __init__(self, loop: Any, draws: bool, as_array: Callable[[Array], Any]):
        """loop: a backend's HostLoop of one row. draws: it takes logits after temperature and filters."""
        self.draws, self._loop, self._as_array = draws, loop, as_array

    def __call__(self, tokens: Sequence[int], logits: Float[Array, " V"]) -> Float[Array, " V"]:
        """Return marked logits of the token that follows the text."""
        ids = self._as_array(np.asarray([tokens], np.int64))
        return np.asarray(self._loop(ids, self._as_array(logits[None])))[0]


class Watermarks:
    """Schemes and keys by the names that requests give."""

    def __init__(self, keys: Mapping[str, Mapping[str, Any]], *, package: str):
        """Read a configuration: fields of WatermarkKey by name. package: the one whose HostLoop marks.

        Raises:
          ValueError: a field is unknown or out of range, a scheme cannot mark, or a key file cannot be read.
        """
        self._package, self._keys = package, {}
        for name, fields in keys.items():
            try:
                self._keys[name] = key = WatermarkKey(**fields)
            except (pydantic.ValidationError, TypeError) as error:
                raise ValueError(f"watermarks.{name}: {' '.join(str(error).split())[:300]}") from error
            config.check_generates(key.scheme, f"watermarks.{name}")
            key.read(name)

    def check(self, request: Request) -> None:
        """Check that a request can be marked as it asks.

        Raises:
          ValueError: it has a payload but no watermark, its watermark is unknown or has no such payload, or the
            watermark draws and the request is greedy, or ignores its seed and it asks for a further answer to the
            same prompt.
        """
        name, payload = request.watermark, request.payload
        if name is None and payload:
            raise ValueError(f"watermark_payload: {payload} without a watermark; name one")
        if name is None:
            return
        if name not in self._keys:
            raise ValueError(f"watermark: {name[:60]!r} is unknown here; wanted one of: {', '.join(self._keys)}")
        scheme = self._keys[name].scheme
        limit = config.num_payloads(scheme)
        if not 0 <= payload < limit:
            raise ValueError(f"watermark_payload: {payload}; {name} carries payloads from 0 to {limit - 1}")
        if scheme.draws and request.sampling.temperature == 0:
            raise ValueError(f"temperature: 0 leaves nothing to draw, and watermark {name} marks by drawing")
        if scheme.ignores_seed and (choice := request.sampling.choice) > 0:
            raise ValueError(f"n: {choice + 1} answers; watermark {name} draws those to one prompt alike, ask for 1")

    def marks(self, vocab_size: int) -> Marks:
        """Prepare the watermarks for logits of vocab_size tokens."""
        return Marks(self._keys, vocab_size=vocab_size, package=self._package)

    def finder(self, tokenizer: Any, vocab_size: int, cache: ResultCache | None = None) -> Finder:
        """Prepare detection of the watermarks; cache: of scores."""
        return Finder(self._keys, tokenizer, vocab_size, cache)

    def candidates(self) -> tuple[identify.Candidate, ...]:
        """Return all of them in the form that identify.identify takes.

        Raises:
          ValueError: a key file cannot be read.
        """
        return tuple(identify.Candidate(name, each.scheme, each.read(name)) for name, each in self._keys.items())

    def described(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Describe some watermarks as `watermark.py identify --watermarks` reads them: schemes and key file paths."""
        return {name: self._keys[name].model_dump(mode="json") for name in names}


class Marks:
    """A backend's watermarks by name; all their compilation happens here."""

    def __init__(self, keys: Mapping[str, WatermarkKey], *, vocab_size: int, package: str):
        """Prepare every scheme.

        Raises:
          ValueError: a key file cannot be read.
        """
        names = ("watermark.logits_processor", "watermark.host_loop")
        processors, loops = (importlib.import_module(f"{package}.{name}") for name in names)
        self._loop_of = loops.HostLoop
        self._as_array = np.asarray if package == "jaxbench" else importlib.import_module("torch").as_tensor
        self._secrets = {name: each.read(name) for name, each in keys.items()}
        self._watermarks = {}
        for name, each in keys.items():
            lists = lists_of(each.scheme, vocab_size=vocab_size)
            self._watermarks[name] = processors.Watermark(each.scheme, vocab_size=vocab_size, green_lists=lists)
        for name, watermark in self._watermarks.items():
            sampling = Sampling(temperature=1.0)
            for length in range(1, MAX_WIDTH + 2):  # every length of recent tokens, short at a text's beginning
                tokens, marker = list(range(length)), self.begin(Request(name, (), 1, sampling, watermark=name))
                for _ in range(2):
                    marker(tokens, np.zeros(watermark.vocab_size, np.float32))
                    tokens.append(0)

    def begin(self, request: Request) -> Marker:
        """Return the marker of a request's answer."""
        watermark = self._watermarks[request.watermark]
        payloads = [request.payload] if config.num_payloads(watermark.scheme) > 1 else None
        loop = self._loop_of(
            watermark, [self._secrets[request.watermark]], payloads=payloads, seed=request.sampling.seed
        )  # fmt: skip
        return Marker(loop, watermark.draws, self._as_array)


class Finder:
    """Looks for every key's mark in texts, in numpy: for servers, where nothing should compile."""

    def __init__(
        self, keys: Mapping[str, WatermarkKey], tokenizer: Any, vocab_size: int, cache: ResultCache | None = None
    ):
        """Read the keys; cache: of scores, None = every text is scored.

        Raises:
          ValueError: a key file cannot be read.
        """
        self.names, self._vocab_size, self._cache = tuple(keys), vocab_size, cache
        # half a second, once; without a tokenizer, `find` takes only token ids
        self._encoder = None if tokenizer is None else TextEncoder(tokenizer, vocab_size=vocab_size)
        self._candidates = {
            name: identify.Candidate(name, each.scheme, each.read(name), lists_of(each.scheme, vocab_size=vocab_size))
            for name, each in keys.items()
        }
        self._detectors = {
            name: detection.NumpyDetector(each.scheme, vocab_size=vocab_size, green_lists=each.green_lists)
            for name, each in self._candidates.items()
        }

    def find(self, text: str | Sequence[int], names: Sequence[str], *, prompt_tokens: int = 0) -> dict[str, Any]:
        """Test a text, or token ids, for each of some keys; also return the p-value of any of them (Holm).

        `is_cached` is true if nothing was computed.

        Raises:
          ValueError: no key is named, a key is unknown, a token lies outside the vocabulary, or a text comes without a
            tokenizer.
        """
        odd = [name for name in names if name not in self._candidates]
        if odd or not names:
            known = ", ".join(self.names) or "none"
            raise ValueError(f"watermarks: {str(odd[:1] or 'none')[:60]} unknown here; wanted some of: {known}")
        strange = [] if isinstance(text, str) else [each for each in text if not 0 <= each < self._vocab_size]
        if strange:
            raise ValueError(f"tokens: {str(strange[0])[:20]} is none; wanted 0 to {self._vocab_size - 1}")
        if isinstance(text, str):
            if self._encoder is None:
                raise ValueError(f"text: {len(text)} characters without a tokenizer; wanted token ids")
            ids = self._encoder.encode([text]).ids
        else:
            ids = Ragged.from_lists([list(text)])
        mine, found, num_known = [self._candidates[name] for name in names], [], 0
        for each in mine:
            one, known = score_cache.detect(
                self._detectors[each.name], ids, each.key, self._cache, prompt_lengths=prompt_tokens
            )
            num_known += known
            found.append({
                "watermark": each.name, "scheme": each.scheme.scheme, "p_value": float(one.p_value[0]),
                "z_score": float(one.score[0]), "num_scored": int(one.num_scored[0]),
                "num_green": _or_none(one.num_green[0]), "payload": _or_none(one.payload[0]),
                "reason": str(one.reason[0]),
            })  # fmt: skip
        p_values = np.array([[each["p_value"] for each in found]])
        corrected = identify.CORRECTIONS["holm"](p_values)[0]
        best = int(p_values[0].argmin())
        return {
            "num_tokens": int(ids.lengths[0]), "is_cached": num_known == len(names),
            "best": found[best]["watermark"], "p_value": float(corrected[best]),
            "watermarks": [each | {"corrected_p_value": float(p)} for each, p in zip(found, corrected)],
        }  # fmt: skip


def _or_none(value: Any) -> int | None:
    return None if int(value) < 0 else int(value)
