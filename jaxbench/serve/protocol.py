"""OpenAI's interface: validated requests of clients, and answers in the form that they expect (S file).

Source: https://platform.openai.com/docs/api-reference (completions, chat completions). A field that is not supported is
refused by name: an answer that ignores a field would look like one that follows it. Additional fields: top_k, min_p,
repetition_penalty, stop_token_ids, ignore_eos, priority, timeout, regex, choice, watermark, watermark_payload,
chat_template_kwargs. Types are strict, as OpenAI's: neither the text "5" nor true is a number.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import pydantic

from jaxbench import prompts
from jaxbench.generation import requests as texts
from jaxbench.serve import constraint, tools
from jaxbench.serve.messages import Body, Message, ToolChoice, check_tool
from jaxbench.serve.request import MAX_LOGPROBS, Request, Sampling


class JsonSchema(Body):
    """A named schema."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(
                f"type={self.type} follows no json_schema; wanted type=json_schema, or the schema left out"
            )
        return self


class StreamOptions(Body):
    """What a stream has in addition to its tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every event: usage so far (vLLM's)


def _token(key: Any) -> int:
    """Parse a token that is a key, which JSON has as a text; in one way only, or two keys could be the same token."""
    if not isinstance(key, str) or not re.fullmatch("0|[1-9][0-9]{0,18}", key):
        raise ValueError(f"{str(key)[:40]!r} is no token id; wanted digits without a leading zero")
    return int(key)


class _Asked(Body):
    """Fields that both interfaces share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = pydantic.Field(default=1, ge=1)
    temperature: float | None = pydantic.Field(default=None, ge=0, le=2)  # null = 1, as OpenAI's; 0, or from 1e-6 on
    top_p: float | None = pydantic.Field(default=None, gt=0, le=1)
    top_k: int = pydantic.Field(default=0, ge=0, lt=2**31)
    min_p: float = pydantic.Field(default=0.0, ge=0, lt=1)
    frequency_penalty: float | None = pydantic.Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = pydantic.Field(default=None, ge=-2, le=2)
    repetition_penalty: float = pydantic.Field(default=1.0, ge=prompts.PENALTIES[0], le=100)
    logit_bias: dict[Annotated[int, pydantic.BeforeValidator(_token)], float] | None = pydantic.Field(
        default=None, max_length=1024
    )
    seed: int | None = pydantic.Field(default=None, ge=-(2**63), lt=2**63)  # null = a random one for each prompt
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = pydantic.Field(default=[], max_length=64)
    ignore_eos: bool = False
    priority: int = pydantic.Field(default=0, ge=-100, le=100)
    timeout: float | None = pydantic.Field(default=None, gt=0)  # seconds until the answer is cut off
    user: str | None = None  # accepted and not used, as OpenAI's
    response_format: ResponseFormat | None = None
    regex: str | None = pydantic.Field(default=None, min_length=1, max_length=10_000)  # that the answer matches
    choice: list[str] | None = pydantic.Field(default=None, min_length=1, max_length=1000)  # texts, one is the answer
    watermark: str | None = pydantic.Field(default=None, max_length=100)  # name of a key of the server
    watermark_payload: int = pydantic.Field(default=0, ge=0, lt=2**31)  # that it carries

    @pydantic.field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        given = [stop] if isinstance(stop, str) else stop or []
        if len(given) > 16 or not all(0 < len(each) <= 1024 for each in given):
            raise ValueError(f"{len(given)} texts; wanted at most 16 of 1 to 1,024 characters")
        for each in given:  # one that is no Unicode text would end no answer
            texts.check_text(each, "it")
        return stop

    @property
    def num_prompts(self) -> int:
        """Number of prompts, each of which gets n answers."""
        return 1

    @property
    def followed(self) -> list[str]:
        """Names of the given fields that constrain the answer."""
        wanted = [name for name in ("regex", "choice") if getattr(self, name) is not None]
        return wanted + (["response_format"] if self.response_format and self.response_format.type != "text" else [])

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that response_format names; None = none.

        Raises:
          ValueError: it names one, and there is none.
        """
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.json_schema is None:
            raise ValueError(f"response_format.json_schema is missing, and type is {form.type!r}")
        return form.json_schema.schema_ or {}

    def grammar(
        self, notation: tools.Notation | None = None, reasoning: constraint.Reasoning | None = None
    ) -> str | None:  # fmt: skip
        """Return the grammar that the answer follows, in constraint.py's form; None = no constraint.

        notation: the model's, of calls; None = not known. reasoning: what may be in front of the answer.

        Raises:
          ValueError: more than one constraint is given, or one that cannot be followed.
        """
        wanted = self.followed
        if len(wanted) > 1:
            raise ValueError(f"{' and '.join(wanted)}: an answer follows one of them; leave the others out")
        if self.regex is not None:
            return constraint.of_regex(self.regex, reasoning)
        if self.choice is not None:
            return constraint.of_choices(self.choice, reasoning)
        schema = self.schema
        return None if schema is None else constraint.of_schema(schema, reasoning=reasoning)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, seed: int, choice: int) -> Sampling:
        """Return the sampling settings of one of the answers."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0, logit_bias=self.logit_bias or {}, seed=seed, choice=choice,
        )  # fmt: skip

    def requests(
        self, id: str, prompt: tuple[int, ...], *, first: int, new_tokens: int, end_ids: frozenset[int], seed: int,
        now: float, grammar: str | None,
    ) -> list[Request]:  # fmt: skip
        """Return one request for each answer to a prompt.

        first: number of the prompt's first answer, counted over all prompts. now: on the engine's clock; the time-out
        counts from it.
        """
        ends = (frozenset() if self.ignore_eos else end_ids) | frozenset(self.stop_token_ids)
        deadline = now + self.timeout if self.timeout is not None else float("inf")
        return [
            Request(
                f"{id}-{first + choice}", prompt, new_tokens, self.sampling(seed, choice), ends, self.stop_texts,
                self.wanted_logprobs, self.priority, deadline, grammar, self.watermark, self.watermark_payload,
            )
            for choice in range(self.n)
        ]  # fmt: skip

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of most probable tokens to report; None = no log-probabilities."""
        raise NotImplementedError


class DetectBody(Body):
    """A text to check for watermarks."""

    text: str | None = None  # either this or tokens
    tokens: list[int] | None = pydantic.Field(default=None, min_length=1)
    prompt_tokens: int = pydantic.Field(default=0, ge=0)  # leading tokens that are not scored
    watermarks: list[str] | None = pydantic.Field(default=None, min_length=1)  # names of keys; null = all of the server

    @pydantic.model_validator(mode="after")
    def _check(self) -> DetectBody:
        if (self.text is None) == (self.tokens is None):
            raise ValueError(f"text and tokens: {2 * (self.text is not None)} of them; wanted one")
        return self


class CompletionBody(_Asked):
    """A request for the continuation of a text."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = pydantic.Field(default=None, ge=1)
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=MAX_LOGPROBS)

    @pydantic.field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or _are_tokens(prompt):
            return prompt
        if isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt):
            return prompt
        if isinstance(prompt, list) and prompt and all(_are_tokens(each) for each in prompt):
            return prompt
        raise ValueError(f"a {type(prompt).__name__}; wanted a text, token ids, or a list of texts or of lists of them")

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids; answers come in their order."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    @property
    def num_prompts(self) -> int:
        """Number of prompts, each of which gets n answers."""
        return len(self.prompts)

    @property
    def wanted_logprobs(self) -> int | None:
        """The field `logprobs`."""
        return self.logprobs

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of tokens of an answer; None = not given."""
        return self.max_tokens


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


class ChatBody(_Asked):
    """A request for the next message of a conversation."""

    messages: list[Message] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(default=None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Annotated[dict[str, Any], pydantic.AfterValidator(check_tool)]] | None = None
    tool_choice: Annotated[ToolChoice | None, pydantic.BeforeValidator(ToolChoice.of)] = None
    parallel_tool_calls: bool | None = None  # false: at most one call in an answer
    chat_template_kwargs: dict[str, Any] = {}  # further variables of the model's template, by vLLM's name
    # accepted, as they change no answer
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @pydantic.field_validator("max_completion_tokens")
    @classmethod
    def _check_most(cls, most: int | None, info: pydantic.ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if most is not None and other not in (None, most):
            raise ValueError(f"{most}, and max_tokens={other}: an answer has one length at most; leave one of them out")
        return most

    @pydantic.field_validator("top_logprobs")
    @classmethod
    def _check_top(cls, top: int | None, info: pydantic.ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise ValueError(f"{top} tokens without log-probabilities; wanted logprobs: true, too")
        return top

    @pydantic.field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: ToolChoice | None, info: pydantic.ValidationInfo) -> ToolChoice | None:
        names = [each["function"]["name"] for each in info.data.get("tools") or []]
        if choice is not None and choice.is_forced and not names:
            raise ValueError(f"{choice.kind}, of {len(names)} tools; wanted some, or the choice left out")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise ValueError(f"function {choice.name[:60]!r}, which is not among the {len(names)} tools")
        return choice

    @pydantic.field_validator("chat_template_kwargs")
    @classmethod
    def _check_depth(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if texts.is_deep(variables):
            raise ValueError(f"objects or lists nested more than {texts.MOST_DEPTH} deep")
        return variables

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, as its template gets them; None = none."""
        is_none = self.tool_choice is not None and self.tool_choice.kind == "none"
        return None if is_none else self.tools or None

    @property
    def is_call(self) -> bool:
        """True where the answer has to be a call."""
        return self.tool_choice is not None and self.tool_choice.is_forced

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the answer may call."""
        name = None if self.tool_choice is None else self.tool_choice.name
        described = [each["function"] for each in self.shown_tools or []]
        return [each for each in described if name in (None, each["name"])]

    @property
    def followed(self) -> list[str]:
        """Names of the given fields that constrain the answer."""
        is_strict = any(each.get("strict") for each in self.functions)
        return super().followed + (["tool_choice"] if self.is_call else ["tools"] if is_strict else [])

    @property
    def has_guided_calls(self) -> bool:
        """True where the answer follows a grammar that leaves room for calls, if the model's notation is known."""
        wanted = self.followed
        return bool(self.shown_tools and not self.is_call and wanted and {*wanted} <= {"response_format", "tools"})

    def grammar(
        self, notation: tools.Notation | None = None, reasoning: constraint.Reasoning | None = None
    ) -> str | None:  # fmt: skip
        """Return the grammar that the answer follows, its calls included; see _Asked's."""
        if notation is not None and self.followed == ["tool_choice"]:
            return notation.grammar(self.functions, is_forced=True)
        if notation is not None and self.has_guided_calls:
            functions = [each if each.get("strict") else each | {"parameters": None} for each in self.functions]
            return notation.grammar(functions, self.schema, reasoning=reasoning)
        return super().grammar(reasoning=reasoning)

    @property
    def wanted_logprobs(self) -> int | None:
        """The field `top_logprobs`, 0 if not given; None unless `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of tokens of an answer; None = not given."""
        return self.max_completion_tokens or self.max_tokens


def place_of(error: pydantic.ValidationError) -> str:
    """Return the field that a body's first problem is in, as a path; "" = in no field."""
    return " ".join(".".join(str(part) for part in error.errors()[0]["loc"]).split())[:80]


def problem(error: pydantic.ValidationError, whole: str = "the body") -> str:
    """Describe a body's first problem in one line: place, what was wanted, value; whole: the place if in no field."""
    first = error.errors()[0]
    place = place_of(error) or whole
    if first["type"] == "extra_forbidden":
        return f"{place} is not served here; leave it out"
    if first["type"] == "missing":
        return f"{place} is missing"
    shown = repr(first.get("input"))
    said = " ".join(first["msg"].removeprefix("Value error, ").split())[:200]
    return f"{place}{': ' * bool(place)}{said} (got {shown if len(shown) <= 80 else shown[:77] + '...'})"


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it; param: the field that it is about."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_object(name: str, **more: Any) -> dict[str, Any]:
    """Describe the served model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "jaxbench", **more}


def usage(prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Return token counts: of prompts, of their cached part, and of answers."""
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def envelope(id: str, kind: str, model: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Wrap the choices of an answer, or of a piece of one."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}
