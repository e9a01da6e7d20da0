"""Chat templates: find them in a model's files, and render messages as transformers does (S file)."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.config import shown

DEFAULT_FILE, TOOLS_FILE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms; templates read the first
_OWN = ("messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception")  # render sets them


class Templates(NamedTuple):
    """A model's templates; None = it has none."""

    plain: str | None
    tools: str | None = None  # used instead if tools are described

    def of(self, tools: Sequence[Any] | None) -> str | None:
        """Pick the one for these tools."""
        return self.plain if tools is None or self.tools is None else self.tools


def of_folder(folder: Path, settings: Mapping[str, Any]) -> Templates:
    """Find a folder's templates: its files, else those of tokenizer_config.json (settings), a text or several by name.

    Raises:
      ValueError: tokenizer_config.json has something else.
    """
    files = [(folder / name) for name in (DEFAULT_FILE, TOOLS_FILE)]
    texts = [file.read_text(encoding="utf-8") if file.is_file() else None for file in files]
    if any(text is not None for text in texts):
        return Templates(*texts)
    given = settings.get("chat_template")
    if given is None or isinstance(given, str):
        return Templates(given)
    try:
        named = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError):
        named = {None: None}
    if not all(isinstance(text, str) for text in (*named, *named.values())):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {shown(given)}, wanted a text or a list of name and "
            "template"
        )
    return Templates(named.get("default"), named.get("tool_use"))


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any] = {},
    now: datetime.datetime | None = None,
) -> str:
    """Render messages as text; the template gets special tokens by name, and no message keys whose value is None.

    Args:
      variables: further ones that the template reads, such as Qwen 3's enable_thinking.
      now: the time of which the template may write the date; None = the clock's.

    Raises:
      ValueError: the template is invalid, fails for these messages in any way, or (UnknownVariable) reads no given one.
    """
    _check_variables(template, variables, special_tokens)
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    chat = [_with_reasoning(message) for message in chat]
    about = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    about["strftime_now"] = (now or datetime.datetime.now()).strftime
    try:
        return _compiled(template).render(**{**about, **variables, **special_tokens, "messages": chat})
    except Exception as error:  # untrusted code: anything that Python raises, and jinja2's own errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"chat: the model's template failed: {reason}") from error


class UnknownVariable(ValueError):
    """A variable that a template does not read."""


def _check_variables(template: str, variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Refuse a variable that would change nothing, or replace what the caller says in another way."""
    if not variables:
        return
    free = sorted(_read_variables(template) - {*_OWN, *special_tokens})
    odd = next((name for name in variables if name not in free), None)
    if odd is not None:
        wanted = f"one of {', '.join(free)}" if free else "none"
        raise UnknownVariable(f"{str(odd)[:60]!r} is no variable that the model's template reads; wanted {wanted}")


@functools.lru_cache(maxsize=16)
def _read_variables(template: str) -> frozenset[str]:
    from jinja2 import meta

    environment = _sandbox()
    try:
        tree = environment.parse(template)
        undeclared = meta.find_undeclared_variables(tree) - environment.globals.keys()
        return frozenset(undeclared & _unassigned(tree, set()))  # jinja2 also counts names that branches assign first
    except Exception as error:  # as in render
        raise ValueError(f"chat: the model's template failed: {' '.join(str(error).split())}") from error


def _unassigned(node: Any, known: set[str]) -> set[str]:
    """Return the names that a part of a template may read before it has assigned them.

    known: names that are assigned in front of it; those that it assigns in every case are added.
    """
    from jinja2 import nodes

    def of(parts: Iterable[Any], names: set[str]) -> set[str]:
        return set().union(*[_unassigned(part, names) for part in parts if part is not None])

    match node:
        case nodes.Name(ctx="load") | nodes.NSRef():
            return {node.name} - known
        case nodes.Name():
            known.add(node.name)
            return set()
        case nodes.Assign():
            return of([node.node, node.target], known)
        case nodes.AssignBlock():
            return of(node.body, {*known}) | of([node.filter, node.target], known)
        case nodes.If():
            bodies = [node.body, *(each.body for each in node.elif_), node.else_]
            ways = [{*known} for _ in bodies]
            found = of([node.test, *(each.test for each in node.elif_)], {*known})
            found = found.union(*map(of, bodies, ways))
            known |= set.intersection(*ways)
            return found
        case nodes.For():
            inside = of([node.target, node.test, *node.body], known | {"loop"})
            return of([node.iter, *node.else_], {*known}) | inside
        case nodes.With():
            return of([*node.values, *node.targets, *node.body], {*known})
        case nodes.Macro() | nodes.CallBlock():
            front = [node.call] if isinstance(node, nodes.CallBlock) else []
            found = of([*front, *node.defaults, *node.args, *node.body], {*known})
            known.update([node.name] if isinstance(node, nodes.Macro) else [])
            return found
        case nodes.Block():  # sees the caller's variables
            return of(node.body, set())
        case nodes.FilterBlock() | nodes.Scope() | nodes.ScopedEvalContextModifier():
            return of(node.iter_child_nodes(), {*known})
    return of(node.iter_child_nodes(), known)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read; some print its keys, in this order."""
    reasoning = next((message[key] for key in REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return _sandbox().from_string(template)  # 50 ms for a template of 2 KB


def _sandbox() -> Any:
    """Environment with the features that transformers' chat templates use.

    A template is untrusted code: no attribute access out of the sandbox, no change of its arguments.
    """
    import jinja2
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """`{% generation %}`: marks an assistant's text for training; its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012  jinja2's own name and kind

        def parse(self, parser: Any) -> Any:
            """Statements up to `{% endgeneration %}`, in their own scope."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Names that a template sets; those of Python's own attributes are refused, as in transformers."""

        def __init__(*given: Any, **named: Any):  # jinja2's signature: `self` may be one of the names
            values = dict(*given[1:], **named)
            jinja2.utils.Namespace.__init__(given[0])
            for name, value in values.items():
                given[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore first: {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(f"{message}")

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # noqa: ANN001  by place too
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": raise_exception, "namespace": Namespace}
    environment.filters["tojson"] = tojson
    return environment
