"""Objects in the bodies of clients: their common base, the messages of a conversation, and its tools (S file).

A part of a message that the model would not see is refused, as a field is (protocol.py).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from jaxbench.generation import requests as texts
from jaxbench.pretrained.chat_template import REASONING


class Body(pydantic.BaseModel):
    """An object of a client: strict types, no field that is not named here, and null is left out."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _take_nulls(cls, value: Any) -> Any:
        """Treat a null field as left out unless it is required; also one that is not served, as clients write them."""
        if not isinstance(value, dict):
            return value
        required = {each.alias or name for name, each in cls.model_fields.items() if each.is_required()}
        return {name: given for name, given in value.items() if given is not None or name in required}


def _arguments(given: Any) -> Any:
    """Parse a call's arguments: clients send them as a JSON text, templates take the object."""
    if not isinstance(given, str):
        raise ValueError(f"a {type(given).__name__}; wanted the text of a JSON object")
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(found, dict):
        raise ValueError(f"JSON of a {type(found).__name__}; wanted the text of a JSON object")
    return found


class Function(Body):
    """A function that the model called."""

    name: str = pydantic.Field(min_length=1)
    arguments: Annotated[dict[str, Any], pydantic.BeforeValidator(_arguments)]
    parsed_arguments: Any = None  # the same, as OpenAI's client adds it to an answer's calls; not read


class ToolCall(Body):
    """A call of a tool in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None  # in the stream that the call came in; not read

    @property
    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        made = {"type": self.type, "function": {"name": self.function.name, "arguments": self.function.arguments}}
        return made if self.id is None else made | {"id": self.id}


def check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Check the description of a tool, and return it as it is: a template may show any of its keys.

    Raises:
      ValueError: it describes no function by name.
    """
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError(f"type {str(tool.get('type'))[:40]!r}; wanted a type function, and a function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ValueError(f"function.name is {str(name)[:40]!r}; wanted a text")
    if parameters is not None and not (isinstance(parameters, dict) and parameters.get("type", "object") == "object"):
        raise ValueError(f"function.parameters is {str(parameters)[:40]}; wanted a JSON schema of type object")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"function.strict is {str(function['strict'])[:40]!r}; wanted true or false")
    return tool


class ToolChoice(NamedTuple):
    """Whether an answer calls tools."""

    kind: Literal["none", "auto", "required", "function"]
    name: str | None = None  # of the function that it has to call

    @property
    def is_forced(self) -> bool:
        """True where the answer has to be a call."""
        return self.kind in ("required", "function")

    @classmethod
    def of(cls, given: Any) -> ToolChoice:
        """Read it as clients send it.

        Raises:
          ValueError: it is something else.
        """
        if given in ("none", "auto", "required"):
            return cls(given)
        function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or given.keys() | function.keys() != {"type", "function", "name"}:
            shown = str(given)[:40]
            raise ValueError(f"{shown!a}; wanted none, auto, required, or a type function with a function of a name")
        return cls("function", name)


def _text_of(part: Any) -> str:
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if given.keys() != {"type", "text"} or given["type"] != "text" or not isinstance(given["text"], str):
        raise ValueError(f"has a part that is no text: {str(part)[:60]!a}; wanted parts of type text")
    return given["text"]


class Message(Body):
    """A message of a conversation."""

    role: Literal[texts.ROLES]
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # taken instead of a content, and not shown to the model
    parsed: Any = None  # the content, as OpenAI's client adds it to an answer; not read
    # for templates that show it, by any of its names (pretrained/chat_template.py)
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    # a text, or parts of type text, which are joined; last, as it may be missing beside some of the others
    content: str | None = pydantic.Field(default=None, validate_default=True)

    @pydantic.field_validator("tool_calls", "tool_call_id", "refusal", "parsed", *REASONING)
    @classmethod
    def _check_role(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        role, wanted = info.data.get("role"), "tool" if info.field_name == "tool_call_id" else "assistant"
        if value is not None and role not in (None, wanted):
            raise ValueError(f"in a message of role {role}; wanted it in one of role {wanted}")
        return value

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any, info: pydantic.ValidationInfo) -> str:
        stands_alone = any(info.data.get(name) is not None for name in ("refusal", *REASONING))
        if content is None and (info.data.get("tool_calls") or stands_alone):
            return ""
        if isinstance(content, list) and content:
            content = "".join(map(_text_of, content))
        if not isinstance(content, str):
            raise ValueError(f"a {type(content).__name__}; wanted a text, or parts of type text")
        return texts.check_text(content, "it") if content else content

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        made: dict[str, Any] = {"role": texts.template_role(self.role), "content": self.content}
        if self.tool_calls:
            made["tool_calls"] = [each.for_template for each in self.tool_calls]
        others = {name: getattr(self, name) for name in ("tool_call_id", *REASONING)}
        return made | {name: value for name, value in others.items() if value is not None}
