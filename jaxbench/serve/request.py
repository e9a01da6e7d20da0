"""A client's request, and the state of its answer (S file)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pydantic
from jaxtyping import Float

from jaxbench import prompts
from jaxbench.config import Base
from jaxbench.serve.constraint import Constraint
from jaxbench.serve.lookup import Lookup

MAX_LOGPROBS = 20  # most probable tokens reported in addition to the chosen one

Ended = Literal["stop", "length", "cancelled", "deadline", "error"]


class Sampling(Base):
    """How an answer's tokens are drawn; each token has a random stream of the seed and its place in the answer."""

    temperature: float = pydantic.Field(default=0.0, ge=0, le=100)  # 0 = the most probable token
    top_k: int = pydantic.Field(default=0, ge=0, lt=2**31)  # 0 = all tokens
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    min_p: float = pydantic.Field(default=0.0, ge=0, lt=1)
    # of tokens in prompt or answer
    repetition_penalty: float = pydantic.Field(default=1.0, ge=prompts.PENALTIES[0], le=100)
    frequency_penalty: float = pydantic.Field(default=0.0, ge=-2, le=2)  # for each time that a token is in the answer
    presence_penalty: float = pydantic.Field(default=0.0, ge=-2, le=2)  # of tokens in the answer
    logit_bias: dict[int, float] = {}  # added to tokens' logits
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    choice: int = pydantic.Field(default=0, ge=0, lt=2**31)  # index among answers to one prompt: row of the stream

    @pydantic.field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < prompts.MIN_TEMPERATURE:
            raise ValueError(f"{temperature}; wanted 0, or at least {prompts.MIN_TEMPERATURE}")
        return temperature

    @pydantic.field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[int, float]) -> dict[int, float]:
        bad = [(token, value) for token, value in bias.items() if token < 0 or not -100 <= value <= 100]
        if bad:
            raise ValueError(
                f"logit_bias of token {bad[0][0]} is {bad[0][1]}; wanted tokens from 0, values -100 to 100"
            )
        return bias

    def params(self) -> prompts.SamplingParams:
        """Return the settings that the generator's draw takes."""
        return prompts.SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def changes_logits(self) -> bool:
        """True where logits are changed before a token is drawn."""
        penalties = (self.repetition_penalty != 1.0, self.frequency_penalty != 0.0, self.presence_penalty != 0.0)
        return any(penalties) or bool(self.logit_bias)


class Request(NamedTuple):
    """A request for one answer."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    end_ids: frozenset[int] = frozenset()  # tokens that end the answer and are part of it
    stop: tuple[str, ...] = ()  # texts that end the answer and are not part of it
    logprobs: int | None = None  # most probable tokens to report, besides the chosen one; None = no log-probabilities
    priority: int = 0  # lower goes first, and may preempt higher
    deadline: float = math.inf  # on the engine's clock
    grammar: str | None = None  # in constraint.py's form; the answer follows it
    watermark: str | None = None  # name of the key (see marking.py) that marks the answer
    payload: int = 0  # that the watermark carries


class TokenLogprobs(NamedTuple):
    """Log-probability, nats, of a token before temperature and filters, and of the most probable ones."""

    token: float
    top: tuple[tuple[int, float], ...]


class Marker(Protocol):
    """Watermarks one text; called once for each of its tokens."""

    draws: bool  # it takes logits after temperature and filters; its result is drawn from unchanged

    def __call__(self, tokens: Sequence[int], logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        """Return the marked logits of the token after the text."""


class RequestState:
    """A request in the engine: its answer so far, its blocks, and what guides its tokens."""

    def __init__(self, request: Request, arrival: int):
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)  # prompt and answer
        self.num_computed = 0  # tokens whose keys and values are in the blocks
        self.num_drafted = 0  # the same for the draft model
        self.blocks: list[int] = []
        self.digests: list[bytes] = []  # of full blocks, which are published
        self.num_cached: int | None = None  # tokens of the prompt that others had computed; None = never admitted
        self.failures = 0  # failed steps that it was in
        self.lookup = Lookup(request.sampling.temperature)
        self.constraint: Constraint | None = None
        self.marker: Marker | None = None
        self.ended: Ended | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: the smallest runs first, the largest is preempted first."""
        return self.request.priority, self.arrival

    @property
    def num_new(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_total_tokens(self) -> int:
        """Number of tokens of the prompt and of the longest answer."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed
