"""Settings of an engine and of a server, and construction of the engine (S file)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxbench.config import Base, TransformerConfig
from jaxbench.generation import decoder
from jaxbench.native import checkpoint
from jaxbench.pretrained import weights
from jaxbench.result_cache import ResultCacheConfig
from jaxbench.serve.constraint import Grammars
from jaxbench.serve.engine import Engine
from jaxbench.serve.marking import Watermarks
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.sizes import row_sizes
from jaxbench.serve.watch import WatchConfig

log = logging.getLogger("jaxbench.serve")

SEGMENT = 64  # tokens


class EngineConfig(Base):
    """A model and its engine."""

    model: str | None = None  # GGUF file, Hugging Face folder or hub id; None = the default model
    backend: Literal["flax", "torch"] = "flax"
    weights: Literal[checkpoint.WEIGHTS] = checkpoint.FILE  # for native kernels; file = as stored in the file
    cache: Literal[checkpoint.CACHE_TYPES] = "float32"  # keys and values
    activations: Literal[tuple(checkpoint.PLANES)] = "float32"
    threads: int = pydantic.Field(default=0, ge=0)  # 0 = all
    hang_s: float = pydantic.Field(default=60.0, ge=1)  # without a finished step, after which its process is killed
    cache_tokens: int = pydantic.Field(default=32_768, ge=128)  # positions that the cache holds
    kernels: Literal["native", "xla"] = "native"  # xla: the framework's own operations, one slot per request
    segment: int = pydantic.Field(default=SEGMENT, ge=2)  # xla: tokens of a prompt that are read at once
    slot_tokens: int | None = pydantic.Field(default=None, ge=2)  # xla: maximum per request; None = the model's
    draft: str | None = None  # a smaller model of the same vocabulary, as `model`, that guesses next tokens
    limits: Limits = Limits()
    watermarks: dict[str, dict[str, Any]] = {}  # by the name that requests give; watermark/serving.py reads them

    @pydantic.model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.draft is not None and not self.limits.max_guessed:
            raise ValueError(
                f"draft={self.draft} guesses nothing with limits.max_guessed=0; set how many tokens it guesses"
            )
        if self.kernels == "xla":
            self._check_xla()
        elif self.slot_tokens is not None or self.segment != SEGMENT:
            name = "segment" if self.slot_tokens is None else "slot_tokens"
            raise ValueError(f"{name}={getattr(self, name)} is for kernels=xla alone; leave it out")
        return self

    def _check_xla(self) -> None:
        fixed = {"cache": "float32", "activations": "float32", "threads": 0, "draft": None}
        odd = [name for name, value in fixed.items() if getattr(self, name) != value]
        if odd:
            raise ValueError(f"{odd[0]}={getattr(self, odd[0])} is for kernels=native alone; leave it out")
        self.limits.check_segment(self.segment)
        wanted = (checkpoint.FILE, *decoder.XLA_WEIGHTS)
        if self.weights not in wanted:
            raise ValueError(f"weights={self.weights} is for kernels=native alone; wanted {' or '.join(wanted)}")

    def read_config(self, path: str | None) -> TransformerConfig:
        """Read the configuration of the model or of its draft.

        Raises:
          ValueError: it cannot be read, or the kernels do not take it.
        """
        return self.checked(weights.read_config(path))

    def checked(self, config: TransformerConfig) -> TransformerConfig:
        """Return the configuration of a decoder, checked to be one that the kernels take.

        Raises:
          ValueError: they do not take it.
        """
        reason = decoder.why_no_block(config)
        if self.kernels == "native" and reason is not None:
            raise ValueError(f"engine.kernels={self.kernels}: {reason}; set engine.kernels=xla")
        return config

    def build(self) -> Any:
        """Build the decoder in the framework's own operations.

        Raises:
          ValueError: the model cannot be read.
        """
        return self.built(weights.load_checkpoint(self.model), "transformer")

    def built(self, held: weights.Checkpoint, module: str) -> Any:
        """Build a decoder with a module of the backend."""
        dtype = decoder.XLA_WEIGHTS[0] if self.weights == checkpoint.FILE else self.weights
        return self.module(module).build(held.config, held.params, dtype=dtype)

    def module(self, name: str) -> Any:
        """Import a module of the backend."""
        package = {"flax": "jaxbench", "torch": "torch_ref"}[self.backend]
        return importlib.import_module(f"{package}.{name}")


class JobsConfig(Base):
    """Background jobs on files of texts, from a queue that other machines may share."""

    folder: str | None = None  # of the queue; None = such requests are refused
    workers: int = pydantic.Field(default=1, ge=0, le=64)  # of this server, which yield to its answers; 0 = others'
    max_bytes: int = pydantic.Field(default=256 * 2**20, ge=1024)  # of one file
    max_waiting: int = pydantic.Field(default=100, ge=1)  # jobs that have not ended
    keep_days: float = pydantic.Field(default=7.0, gt=0)  # that a job is kept after its end


class ServerConfig(Base):
    """Settings of a server."""

    engine: EngineConfig = EngineConfig()
    host: str = "127.0.0.1"
    port: int = pydantic.Field(default=8000, ge=0, le=65535)  # 0 = a free one
    # the model's name to clients; None = that of its file or folder
    name: str | None = pydantic.Field(default=None, min_length=1)
    max_body_bytes: int = pydantic.Field(default=4 * 2**20, ge=1024)
    max_choices: int = pydantic.Field(default=32, ge=1)  # answers to a request, over all its prompts
    default_new_tokens: int = pydantic.Field(default=256, ge=1)  # of a request that does not give it
    # seconds that a request's head may take, and that its body may pause; after that the connection is closed
    silence_s: float = pydantic.Field(default=30.0, gt=0)
    drain_s: float = pydantic.Field(default=30.0, ge=0)  # for answers in progress when the server is told to end
    result_cache: ResultCacheConfig = ResultCacheConfig()  # of the scores of watermark detection
    jobs: JobsConfig = JobsConfig()
    alerts: WatchConfig = WatchConfig()

    @property
    def shown_name(self) -> str:
        """The model's name in the interface."""
        # absolute, as `.` has no name of its own; links are not followed
        return self.name or ("default" if self.engine.model is None else Path(os.path.abspath(self.engine.model)).name)


def load_engine(
    config: EngineConfig, *, watermarks: Watermarks | None = None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Engine:  # fmt: skip
    """Load the engine and compile its programs; progress: called with the number of programs ready, and of all.

    Raises:
      ValueError: the model cannot be read, or a setting does not match it.
      NotAvailable: native kernels are not available here.
    """
    make = _slot_runner if config.kernels == "xla" else _block_runners
    runner, *draft = make(config, progress)
    grammars = _grammars(config.model, runner.vocab_size)
    return Engine(runner, config.limits, grammars=grammars, watermarks=watermarks, draft=draft[0] if draft else None)


def _block_runners(config: EngineConfig, progress: Callable[[int, int], Any]) -> list[Any]:
    """Build runners on native kernels: for the model, and for its draft if it has one."""
    names = ("native.model", "native.paged", "serve.native_runner")
    native, paged, runners = map(config.module, names)
    paths = [config.model] if config.draft is None else [config.model, config.draft]
    how = {"cache_dtype": config.cache, "activations": config.activations, "threads": config.threads}
    sizes, limits = row_sizes(config.limits), config.limits
    advance = _counted(progress, len(paths) * (len(sizes) + sum(size < limits.max_logits for size in sizes) + 2))
    return [
        runners.NativeRunner(
            native.build(checkpoint.load(path, weights_as=config.weights), **how), sizes=sizes,
            num_blocks=1 + config.cache_tokens // paged.PAGE_SIZE, max_wanted=limits.max_logits, progress=advance,
        )
        for path in paths
    ]  # fmt: skip


def _slot_runner(config: EngineConfig, progress: Callable[[int, int], Any]) -> list[Any]:
    """Build the runner on the framework's own operations; slots: what cache_tokens has room for, max_running at most.

    Raises:
      ValueError: cache_tokens has no room for a slot.
    """
    model, limits = config.build(), config.limits
    slot_tokens = min(model.max_seq_len, config.slot_tokens or model.max_seq_len)
    num_slots = min(limits.max_running, config.cache_tokens // slot_tokens)
    if not num_slots:
        raise ValueError(f"cache_tokens={config.cache_tokens}: wanted at least the {slot_tokens} of one request")
    made = config.module("serve.slot_runner").SlotRunner(
        model, num_slots=num_slots, slot_tokens=slot_tokens, segment=config.segment,
        max_rows=limits.max_batch_tokens, progress=_counted(progress, 1 if config.backend == "torch" else 3),
    )  # fmt: skip
    return [made]


def _counted(progress: Callable[[int, int], Any], total: int) -> Callable[[], None]:
    """Return a function to call after each of `total` programs; it reports the progress."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return advance


def _grammars(model: str | None, vocab_size: int) -> Grammars | None:
    """Return grammars over a model's tokens; None if llguidance is not installed or does not take the tokenizer."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    from jaxbench.pretrained.tokenizer import load_tokenizer

    try:
        return Grammars(load_tokenizer(model), vocab_size)
    except ValueError as error:  # a tokenizer without an end, or larger than the logits
        log.warning("no grammars", extra={"fields": {"error": str(error)}})
        return None
