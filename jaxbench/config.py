"""Configuration models shared by every workload (S file: neither JAX nor PyTorch).

A configuration is a frozen pydantic model read from YAML. An unknown key is an error that names the file, the key and
the nearest known key. Library functions take the fields they use, never a whole configuration.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pydantic

from jaxbench import outputs, yaml_files


class Base(pydantic.BaseModel):
    """A frozen configuration that rejects unknown keys and numbers that are not finite."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RotaryScaling(Base):
    """How rotary frequencies are stretched past the trained context.

    Sources: linear, Chen et al. 2023, arXiv:2306.15595; llama3, Llama 3.1 reference implementation; yarn, Peng et al.
    2023, arXiv:2309.00071.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = pydantic.Field(gt=0)  # how many times longer the context becomes, > 0
    low_freq_factor: float = pydantic.Field(default=1.0, gt=0)  # llama3 only: wavelengths above original / low grow
    high_freq_factor: float = pydantic.Field(default=4.0, gt=0)  # llama3 only: those below original / high are kept
    original_max_seq_len: int = pydantic.Field(default=8192, gt=0)  # llama3 and yarn: trained context, tokens
    beta_fast: float = pydantic.Field(default=32.0, gt=0)  # yarn only: pairs of more turns in the context are kept
    beta_slow: float = pydantic.Field(default=1.0, gt=0)  # yarn only: pairs of fewer turns are divided by factor
    truncate: bool = True  # yarn only: the two limits are rounded outwards to whole pairs of a head
    attention_factor: float | None = pydantic.Field(default=None, gt=0)  # yarn only; None = 0.1 ln(factor) + 1

    @property
    def magnitude(self) -> float:
        """Factor on rotated queries and on rotated keys: 1 except for yarn (its equation 22)."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


class TransformerConfig(Base):
    """Shape of a decoder of the Llama, Qwen, Gemma or GPT-2 family."""

    vocab_size: int = pydantic.Field(gt=0)  # tokens
    d_model: int = pydantic.Field(gt=0)  # residual width
    d_ff: int = pydantic.Field(gt=0)  # feed-forward width
    num_layers: int = pydantic.Field(gt=0)
    num_heads: int = pydantic.Field(gt=0)  # query heads
    num_kv_heads: int = pydantic.Field(gt=0)  # key-value heads; divides num_heads
    head_dim: int = pydantic.Field(gt=0)  # width of one head
    max_seq_len: int = pydantic.Field(gt=0)  # trained context, tokens
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    activation: Literal["swiglu", "geglu", "gelu"] = "swiglu"  # geglu, gelu: with the tanh approximation of GPT-2
    position: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = pydantic.Field(default=10000.0, gt=0)  # rotary base wavelength parameter
    rope_scaling: RotaryScaling | None = None
    qk_norm: bool = False  # RMSNorm over head_dim of each head's query and key, before rotary positions (Qwen3)
    use_bias: bool = False  # biases on every projection
    qkv_bias: bool = False  # biases on query, key and value only (Qwen2)
    post_norms: bool = False  # also normalise what attention and feed-forward layer add (Gemma 2)
    embedding_scale: float = pydantic.Field(default=1.0, gt=0)  # of tokens' embeddings; sqrt(d_model) in Gemma
    query_pre_attn_scalar: float | None = pydantic.Field(default=None, gt=0)  # scores / its root; None = head_dim
    attention_softcap: float | None = pydantic.Field(default=None, gt=0)  # c tanh(score / c) (Gemma 2)
    logit_softcap: float | None = pydantic.Field(default=None, gt=0)  # c tanh(logit / c) (Gemma 2)
    tie_embeddings: bool = True  # logits from the transposed embedding
    sliding_window: int | None = pydantic.Field(default=None, gt=0)  # tokens a query sees, itself included
    global_every: int | None = pydantic.Field(default=None, gt=1)  # every n-th layer has no window (Gemma 2 and 3)
    local_rope_theta: float | None = pydantic.Field(default=None, gt=0)  # of layers with a window, unscaled (Gemma 3)
    is_causal: bool = True  # False = an encoder: tokens attend to all of their row
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)  # probability of dropping a residual branch's value

    @pydantic.model_validator(mode="after")
    def _check_shapes(self) -> TransformerConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(f"model: rotary positions need an even head_dim, got head_dim={self.head_dim}")
        if self.global_every is not None and self.sliding_window is None:
            raise ValueError(f"model: global_every={self.global_every} needs a sliding_window, got None")
        if self.sliding_window is not None and not self.is_causal:
            raise ValueError(f"model: is_causal=False goes with no sliding_window, got {self.sliding_window}")
        if self.local_rope_theta is not None and (self.global_every is None or self.position != "rotary"):
            theta, given = self.local_rope_theta, f"global_every={self.global_every}, position={self.position}"
            raise ValueError(f"model: local_rope_theta={theta} needs global_every and rotary positions, got {given}")
        if (scaling := self.rope_scaling) is None:
            return self
        if self.position != "rotary":
            raise ValueError(f"model: rope_scaling={scaling.kind} needs rotary positions, got {self.position}")
        if scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"model: yarn with rope_theta={self.rope_theta} is not supported, wanted more than 1")
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if scaling.kind == "llama3" and low >= high:
            raise ValueError(f"model: llama3 with low_freq_factor={low} and high_freq_factor={high}, wanted low < high")
        return self

    @property
    def is_gated(self) -> bool:
        """True where the feed-forward layer multiplies by a gate."""
        return self.activation in ("swiglu", "geglu")

    @property
    def query_scale(self) -> float:
        """Factor on queries before attention, which divides scores by sqrt(head_dim).

        Includes yarn's factor for both queries and keys, since only their product matters.
        """
        magnitude = 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude
        return magnitude**2 * math.sqrt(self.head_dim / (self.query_pre_attn_scalar or self.head_dim))

    def at_layer(self, index: int) -> TransformerConfig:
        """Configuration of one layer, where windows or rotary frequencies differ from layer to layer."""
        if self.global_every is not None and (index + 1) % self.global_every == 0:
            return self.model_copy(update={"sliding_window": None})
        if not self.is_local:
            return self
        return self.model_copy(update={"rope_theta": self.local_rope_theta, "rope_scaling": None})

    @property
    def is_local(self) -> bool:
        """True if layers have a window with separate rotary angles (Gemma 3)."""
        return self.local_rope_theta is not None and self.sliding_window is not None

    # What the core asks about layers; a workload with its own kind of layers overrides it (extension.py).
    @property
    def layer_kind(self) -> str | None:
        """Kind of the layers that a workload adds; None = all layers are plain blocks."""
        return None

    def layer_counts(self) -> dict[int, int]:
        """Number of layers of each kind, keyed by the index of one of them."""
        return {0: self.num_layers}

    def num_keys(self, index: int, seq_len: int) -> int:
        """Number of keys that the last of seq_len tokens attends to in a layer."""
        return min(seq_len, self.at_layer(index).sliding_window or seq_len)

    def layer_shapes(self, index: int, plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Parameter shapes of a layer, keyed by name within it; plain: those of a plain block."""
        return plain

    def own_params(self, seed: int, *, distinct: bool, std: float) -> dict[str, np.ndarray]:
        """Initial values, by dotted name, of the parameters that only a workload's layers have (see initial.py)."""
        return {}

    def check_documents(self, segments: np.ndarray) -> None:
        """Raise ValueError if a row of segment ids [B T], 0 = padding, has more documents than layers tell apart."""


class Compute(NamedTuple):
    """How a decoder is computed; its function (up to rounding), its parameters and their names stay the same."""

    dtype: str = "float32"  # of parameters and products
    implementation: str = "dense"  # of attention (attention.py)
    block_size: int = 128  # keys read at once by blocked attention
    scan_layers: bool = False  # JAX: one compiled body for all layers
    # 0 = one product per projection; n = one for q, k, v and one for gate, up, in n interleaved parts (nn.project)
    projection_groups: int = 0
    # PyTorch: "" = eager, "layers" = its layers are compiled, "step" = the whole decode step too (torch_ref/sample.py)
    torch_compile: str = ""


# Reading, writing and naming configurations

Model = TypeVar("Model", bound=Base)
MAX_ERRORS = 3  # errors spelled out in one message
MAX_SHOWN = 120  # characters of a text in an error


def load(path: str | Path, overrides: Sequence[str] = (), model_class: type[Model] = TransformerConfig) -> Model:
    """Read a YAML file, apply overrides in order (`a.b=value`, whose value is YAML too) and check the result.

    Raises:
      ValueError: the file is invalid; one line names file, key, value and what was wanted, or the nearest known key.
    """
    content = yaml_files.read(Path(path))
    changed = {override(content, text): text for text in overrides}
    try:
        model = model_class.model_validate(content)
    except pydantic.ValidationError as error:
        raise ValueError(_describe(error, Path(path), changed, model_class)) from error
    _refuse_switches(content, model.model_dump(), str(path))
    return model


def dump(model: pydantic.BaseModel, path: str | Path | None = None) -> str:
    """YAML text of a configuration, which `load` reads back; with `path`, also written there, whole or not at all."""
    import yaml

    text = yaml.safe_dump(model.model_dump(mode="json"), sort_keys=False, default_flow_style=False)
    if path is not None:
        outputs.write_text(path, text)
    return text


def config_id(model: pydantic.BaseModel, *, exclude: Iterable[str] = (), extra: dict[str, Any] | None = None) -> str:
    """Stable id of a configuration: 12 hex digits of the sha256 of its canonical JSON.

    A value equal to its default counts as left out, so the id does not depend on how a file is written.

    Args:
      exclude: dotted keys that do not change what is measured, e.g. `rounds.launches`.
      extra: what a file only points to, e.g. `{"model_sha256": ..., "text_sha256": ...}`.
    """
    content = model.model_dump(mode="json")
    for key in exclude:
        *parents, last = key.split(".")
        place = content
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            raise ValueError(f"config_id: exclude names {key!r}, which is no key of {type(model).__name__}")
        del place[last]
    canonical = json.dumps({"config": content, "extra": extra or {}}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def keys(model_class: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key that a configuration of this class takes."""
    names = []
    for name, field in model_class.model_fields.items():
        names.append(prefix + name)
        for inner in _models_in(field.annotation):
            names += keys(inner, f"{prefix}{name}.")
    return names


def _refuse_switches(given: Any, resolved: Any, place: str) -> None:
    """Raise ValueError if true or false was given for a number: pydantic would read 1 or 0."""
    pairs: Iterable = ()
    if isinstance(given, dict) and isinstance(resolved, dict):
        pairs = [(value, resolved[key], f"{place}: {key}") for key, value in given.items() if key in resolved]
    elif isinstance(given, list) and isinstance(resolved, (list, tuple)):
        pairs = [(value, inner, place) for value, inner in zip(given, resolved, strict=False)]
    elif isinstance(given, bool) and isinstance(resolved, (int, float)) and not isinstance(resolved, bool):
        raise ValueError(f"{place} is {str(given).lower()}: input should be a number")
    for value, inner, where in pairs:
        _refuse_switches(value, inner, where)


def override(content: dict, text: str) -> tuple[str, ...]:
    """Set one `a.b=value` in a mapping, in place, and return its path.

    Raises:
      ValueError: the text has another form, its value is not YAML, or a key above it holds no mapping.
    """
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ValueError(f"--set {text!r} is not of the form key=value or a.b=value")
    try:
        parsed = yaml_files.parse(value, "it")
    except ValueError as error:
        raise ValueError(f"--set {text!r}: {value!r} is not a YAML value ({error}); put quotes around text") from error
    place = content
    for depth, name in enumerate(path[:-1]):
        inner = place[name] = {} if place.get(name) is None else place[name]
        if not isinstance(inner, dict):
            above = ".".join(path[: depth + 1])
            raise ValueError(f"--set {text!r}: {above} is {shown(inner)}, which has no keys below it")
        place = inner
    place[path[-1]] = parsed
    return path


def _describe(error: pydantic.ValidationError, path: Path, changed: dict, model_class: type[Base]) -> str:
    """One-line error message for all problems; for a value that came from --set it names that, not the file."""
    problems, found = [], error.errors(include_url=False)
    places = [problem["loc"] for problem in found]
    for problem, place in zip(found, places):
        if problem["type"] == "too_short" and any(other[: len(place)] == place != other for other in places):
            continue  # pydantic counts a list's entries without those that it refused
        key = ".".join(str(part) for part in place)
        source = next((f"--set {text}" for at, text in changed.items() if place[: len(at)] == at), str(path))
        problems.append(f"{source}: {_problem(problem, key, place, model_class)}")
    more = f"; and {len(problems) - MAX_ERRORS} more" if len(problems) > MAX_ERRORS else ""
    return "; ".join(problems[:MAX_ERRORS]) + more


def _problem(problem: Any, key: str, place: tuple, model_class: type[Base]) -> str:
    """Error message of one of pydantic's problems."""
    if problem["type"] == "extra_forbidden":
        return f"key {key!r} is unknown{_nearest(key, place, model_class)}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and not key:
        return message
    return f"key {key!r} is {shown(problem['input'])}: {message[0].lower()}{message[1:]}"


def said(error: BaseException) -> str:
    """Message of an error; of pydantic's, every problem with its field and value, without pydantic's own words."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    problems = []
    for problem in error.errors(include_url=False):
        place, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        problems.append(f"{place}={shown(problem['input'])}: {message}" if place else message)
    return "; ".join(problems)


def shown(value: Any) -> str:
    """Text of a value for an error message, truncated: YAML aliases can make billions of items of a few lines."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, MAX_SHOWN, MAX_SHOWN
    return short.repr(value)


def _nearest(key: str, place: tuple, model_class: type[Base]) -> str:
    """Suggest a similar key: first at the level of the unknown one, then anywhere in the tree."""
    known = keys(model_class)
    above = ".".join(str(part) for part in place[:-1] if isinstance(part, str))
    beside = [name for name in known if name.rpartition(".")[0] == above]
    for names, cutoff in ((beside, 0.5), (known, 0.6)):
        last = {name.rpartition(".")[2]: name for name in reversed(names)}  # the first of equal ones
        if close := difflib.get_close_matches(str(place[-1]), last, n=1, cutoff=cutoff):
            return f", the nearest is {last[close[0]]}"
    return f", wanted one of {', '.join(name.rpartition('.')[2] for name in beside) or 'none'}"


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the models inside an annotation such as `Inner`, `Inner | None` or `tuple[Inner, ...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, pydantic.BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
