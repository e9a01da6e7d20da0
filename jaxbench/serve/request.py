"""What a client asks for, and how far its answer is (S file)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pydantic
from jaxtyping import Float

from jaxbench import prompts
from jaxbench.config import Base
from jaxbench.serve.constraint import Constraint
from jaxbench.serve.lookup import Lookup

MAX_LOGPROBS = 20  # tokens beside the chosen one

Ended = Literal["stop", "length", "cancelled", "deadline", "error"]


class Sampling(Base):
    """How an answer's tokens are drawn; each of its tokens from a stream of the seed and its place in the answer."""

    temperature: float = pydantic.Field(default=0.0, ge=0, le=100)  # 0 = the most probable token
    top_k: int = pydantic.Field(default=0, ge=0, lt=2**31)  # 0 = all tokens
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    min_p: float = pydantic.Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = pydantic.Field(default=1.0, gt=0, le=100)  # of tokens in prompt or answer
    frequency_penalty: float = pydantic.Field(default=0.0, ge=-2, le=2)  # for each time that a token is in the answer
    presence_penalty: float = pydantic.Field(default=0.0, ge=-2, le=2)  # of tokens in the answer
    logit_bias: dict[int, float] = {}  # added to tokens' logits
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    choice: int = pydantic.Field(default=0, ge=0, lt=2**31)  # of several answers to one prompt: the row of the stream

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
        """What of it the generator's draw takes."""
        return prompts.SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def changes_logits(self) -> bool:
        """True where logits are changed before a token is drawn."""
        penalties = (self.repetition_penalty != 1.0, self.frequency_penalty != 0.0, self.presence_penalty != 0.0)
        return any(penalties) or bool(self.logit_bias)


class Request(NamedTuple):
    """One answer that is wanted."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    end_ids: frozenset[int] = frozenset()  # tokens that end the answer and are part of it
    stop: tuple[str, ...] = ()  # texts that end it and are not
    logprobs: int | None = None  # how many of the most probable tokens are told beside the chosen one; None = nothing
    priority: int = 0  # lower goes first, and may take the room of higher
    deadline: float = math.inf  # of the engine's clock
    grammar: str | None = None  # of constraint.py, which the answer follows
    watermark: str | None = None  # name of a key of marking.py, which marks the answer
    payload: int = 0  # that the watermark carries


class TokenLogprobs(NamedTuple):
    """Log-probability, nats, of a token before temperature and filters, and of the most probable ones."""

    token: float
    most: tuple[tuple[int, float], ...]


class Marker(Protocol):
    """What marks one text; called once for each of its tokens."""

    draws: bool  # it takes logits behind temperature and filters, and what it returns is drawn as it is

    def __call__(self, tokens: Many[int], logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        """Logits of the token behind the text, marked."""


class Sequence:
    """A request in the engine."""

    def __init__(self, request: Request, arrival: int):
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)  # prompt and answer
        self.num_computed = 0  # tokens whose keys and values are in the blocks
        self.num_drafted = 0  # the same of a draft model's
        self.blocks: list[int] = []
        self.digests: list[bytes] = []  # of whole blocks that are known
        self.num_cached: int | None = None  # tokens that were found in the cache at the first admission
        self.failures = 0  # steps that failed with it
        self.lookup = Lookup(request.sampling.temperature)
        self.constraint: Constraint | None = None
        self.marker: Marker | None = None
        self.ended: Ended | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: the least goes first, the largest gives its room away first."""
        return self.request.priority, self.arrival

    @property
    def num_new(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def num_waiting(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed
