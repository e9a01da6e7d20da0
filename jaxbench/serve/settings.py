"""Settings of an engine and of a server, and how an engine is made of them (S file)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
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
    weights: Literal[checkpoint.WEIGHTS] = checkpoint.FILE  # of native kernels; file = as the file has them
    cache: Literal[checkpoint.CACHE_TYPES] = "float32"  # keys and values
    activations: Literal[tuple(checkpoint.PLANES)] = "float32"
    threads: int = pydantic.Field(default=0, ge=0)  # 0 = all
    hang_s: float = pydantic.Field(default=60.0, ge=1)  # without a step's end, behind which its process is killed
    cache_tokens: int = pydantic.Field(default=32_768, ge=128)  # positions that the cache holds
    kernels: Literal["native", "xla"] = "native"  # xla: the framework's own operations, in slots of a request each
    segment: int = pydantic.Field(default=SEGMENT, ge=2)  # xla: tokens of a prompt that are read at once
    slot_tokens: int | None = pydantic.Field(default=None, ge=2)  # xla: of a request at most; None = the model's most
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
        """Configuration of the model or of its draft.

        Raises:
          ValueError: it cannot be read, or the kernels do not take it.
        """
        return self.checked(weights.read_config(path))

    def checked(self, config: TransformerConfig) -> TransformerConfig:
        """The configuration of a decoder, where the kernels take it.

        Raises:
          ValueError: they do not.
        """
        reason = decoder.why_no_block(config)
        if self.kernels == "native" and reason is not None:
            raise ValueError(f"engine.kernels={self.kernels}: {reason}; set engine.kernels=xla")
        return config

    def build(self) -> Any:
        """The decoder, in the framework's own operations.

        Raises:
          ValueError: the model cannot be read.
        """
        return self.built(weights.load_checkpoint(self.model), "transformer")

    def built(self, held: weights.Checkpoint, module: str) -> Any:
        """A decoder as a module of the backend builds it."""
        dtype = decoder.XLA_WEIGHTS[0] if self.weights == checkpoint.FILE else self.weights
        return self.module(module).build(held.config, held.params, dtype=dtype)

    def module(self, name: str) -> Any:
        """A module of the backend."""
        package = {"flax": "jaxbench", "torch": "torch_ref"}[self.backend]
        return importlib.import_module(f"{package}.{name}")


class JobsConfig(Base):
    """Files of texts that are worked on aside, from a queue that other machines may share."""

    folder: str | None = None  # of the queue; None = no such requests are taken
    workers: int = pydantic.Field(default=1, ge=0, le=64)  # of this server, behind its answers; 0 = others'
    max_bytes: int = pydantic.Field(default=256 * 2**20, ge=1024)  # of one file
    max_waiting: int = pydantic.Field(default=100, ge=1)  # jobs that have not ended
    keep_days: float = pydantic.Field(default=7.0, gt=0)  # that a job stays since it ended


class ServerConfig(Base):
    """What a server lets in."""

    engine: EngineConfig = EngineConfig()
    host: str = "127.0.0.1"
    port: int = pydantic.Field(default=8000, ge=0, le=65535)  # 0 = a free one
    name: str | None = None  # the model's in the interface; None = that of its file
    max_body_bytes: int = pydantic.Field(default=4 * 2**20, ge=1024)
    max_choices: int = pydantic.Field(default=8, ge=1)  # n of a request
    default_new_tokens: int = pydantic.Field(default=256, ge=1)  # of a request that does not say
    # seconds that a request's head may take, and that its body may stand still; behind it the connection is closed
    silence_s: float = pydantic.Field(default=30.0, gt=0)
    drain_s: float = pydantic.Field(default=30.0, ge=0)  # that answers in progress have when the server is told to end
    result_cache: ResultCacheConfig = ResultCacheConfig()  # of scores that watermarks were looked for with
    jobs: JobsConfig = JobsConfig()
    alerts: WatchConfig = WatchConfig()

    @property
    def shown_name(self) -> str:
        """The model's name in the interface."""
        return self.name or ("default" if self.engine.model is None else Path(self.engine.model).name)


def load_engine(
    config: EngineConfig, *, watermarks: Watermarks | None = None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Engine:  # fmt: skip
    """The engine, its programs compiled; progress: programs that are ready, and all.

    Raises:
      ValueError: the model cannot be read, or a setting does not go with it.
      NotAvailable: native kernels cannot be had here.
    """
    make = _slot_runner if config.kernels == "xla" else _block_runners
    runner, *draft = make(config, progress)
    grammars = _grammars(config.model, runner.vocab_size)
    return Engine(runner, config.limits, grammars=grammars, watermarks=watermarks, draft=draft[0] if draft else None)


def _block_runners(config: EngineConfig, progress: Callable[[int, int], Any]) -> list[Any]:
    """Runners by native kernels: of the model, and of its draft where it has one."""
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
    """The runner by the framework's own operations, with as many slots as the cache has positions for.

    Raises:
      ValueError: it has positions for none.
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
    """What is called behind each of so many programs."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return advance


def _grammars(model: str | None, vocab_size: int) -> Grammars | None:
    """Grammars over a model's tokens; None where llguidance is not installed, or does not take the tokenizer."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    from jaxbench.pretrained.tokenizer import load_tokenizer

    try:
        return Grammars(load_tokenizer(model), vocab_size)
    except ValueError as error:  # a tokenizer without an end, or larger than the logits
        log.warning("no grammars", extra={"fields": {"error": str(error)}})
        return None
