"""Read the project's syntax trees: what test_layout.py and test_mirror.py assert on, and what they try to fool."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxbench", "torch_ref")
CALLS = {"forward": "__call__"}  # torch calls a module's computation forward, the others __call__
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A spot in a file, printed as path:line name."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.what}"


def sources(*packages: str) -> list[Path]:
    """Return the Python files of packages or folders, sorted."""
    return sorted(path for name in packages for path in (ROOT / name).rglob("*.py") if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    """Return a path as the reader writes it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# Imports


def imports(tree: ast.AST, *, lazy: bool = True) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) of every import; with lazy=False only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)
        elif isinstance(node, Function | ast.Lambda) and not lazy:
            continue
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        else:
            yield from imports(node, lazy=lazy)


def forbidden_imports(path: Path, roots: tuple[str, ...], *, lazy: bool = True) -> list[Place]:
    """Return the imports of `roots` (or of what lies below them) in a file."""
    return sorted(
        {
            Place(relative(path), line, f"imports {name}")
            for name, line in imports(tree_of(path), lazy=lazy)
            if any(name == root or name.startswith(root + ".") for root in roots)
        }
    )


def module_name(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """Return which known modules a file imports, at any depth, or names in a string, as import_module takes them."""
    named = {name for name, _ in imports(tree)}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return (named | {text.partition(":")[0] for text in texts}) & known


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that lead to each other, as sorted lists; arrows: what each module names."""
    reached = {}
    for name in arrows:
        reached[name], left = set(), [name]
        while left:
            new = arrows.get(left.pop(), set()) - reached[name]
            reached[name] |= new
            left += new
    back = {name: [other for other in around if name in reached.get(other, ())] for name, around in reached.items()}
    return [list(each) for each in sorted({tuple(sorted(others)) for others in back.values()}) if len(each) > 1]


# Raises, docstrings, sizes


def silent_raises(tree: ast.AST, path: str) -> list[Place]:
    """Return the raises whose message is a fixed text: a reader cannot see which value was wrong."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue  # `raise` and `raise error` pass on what came
        arguments = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
        if all(_is_fixed(argument) for argument in arguments):
            found.append(Place(path, node.lineno, ast.unparse(node.exc)[:80]))
    return found


def _is_fixed(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr):
        return not any(isinstance(part, ast.FormattedValue) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _is_fixed(node.left) and _is_fixed(node.right)
    return isinstance(node, ast.Constant) and not isinstance(node.value, int)  # SystemExit(2) is a code, not a text


def undocumented(tree: ast.Module, path: str) -> list[Place]:
    """Return the module, and its public functions, classes and methods, where they lack a docstring."""
    found = [] if ast.get_docstring(tree) or not tree.body else [Place(path, 1, "module")]
    for name, node in definitions(tree):
        if not ast.get_docstring(node):
            found.append(Place(path, node.lineno, name))
    return found


def definitions(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield the public functions and classes of a module and the public methods of its classes."""
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, Function) and not inner.name.startswith("_"):
                yield f"{node.name}.{inner.name}", inner


def long_functions(tree: ast.Module, path: str, limit: int) -> list[Place]:
    """Return the functions of more than `limit` lines, docstring and decorators included."""
    return [
        Place(path, node.lineno, f"{node.name} has {node.end_lineno - node.lineno + 1} lines")
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno - node.lineno + 1 > limit
    ]


# Twins


def public_api(tree: ast.Module) -> dict[str, list[str]]:
    """Return public name -> argument names: functions, classes, public methods, constructors, NamedTuple fields.

    Keyword-only arguments carry a `*` in front. `self` and `device` are left out, and `forward` is called `__call__`.
    """
    api: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            api[node.name] = _arguments(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            api |= _class_api(node)
    return api


def _class_api(node: ast.ClassDef) -> dict[str, list[str]]:
    tuples = any(ast.unparse(base) in ("NamedTuple", "typing.NamedTuple") for base in node.bases)
    fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)] if tuples else []
    api = {node.name: fields}
    for inner in node.body:
        if isinstance(inner, Function):
            name = CALLS.get(inner.name, inner.name)
            if not name.startswith("_") or name in ("__call__", "__init__"):
                api[f"{node.name}.{name}"] = _arguments(inner)
    return api


def _arguments(node: Function) -> list[str]:
    plain = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    named = ["*" + item.arg for item in node.args.kwonlyargs]
    spread = ["*" + node.args.vararg.arg] if node.args.vararg else []
    spread += ["**" + node.args.kwarg.arg] if node.args.kwarg else []
    return [name for name in plain + named + spread if name.lstrip("*") not in ("self", "cls", "device")]


def differences(left: ast.Module, right: ast.Module) -> list[str]:
    """Return one sentence for every public name or argument that two twins do not share."""
    one, other = public_api(left), public_api(right)
    found = [f"{name} is missing in the second" for name in one if name not in other]
    found += [f"{name} is missing in the first" for name in other if name not in one]
    for name in one:
        if name in other and one[name] != other[name]:
            found.append(f"{name}({', '.join(one[name])}) against ({', '.join(other[name])})")
    return found
