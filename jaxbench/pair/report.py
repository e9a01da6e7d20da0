"""Report a pair's result as text, on a terminal and as a page; gates and modules as in jaxbench/parity (S file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.measure import page
from jaxbench.pair.rules import Rule
from jaxbench.parity import report

MAX_WEIGHTS = 40  # rows of the weights' table on a terminal
MAX_BLAMED = 4  # modules that the verdict names
MAX_ASSUMED = 4  # weights that the verdict names
# Advice where only gradients differ.
GRADIENTS = (
    "values agree, gradients do not: look for stop_gradient or detach on one side, a backward pass of its own "
    "(jax.custom_vjp, torch.autograd.Function), or an embedding's padding_idx, whose row gets no gradient"
)


def text(result: Any) -> str:
    """Return the verdict in a few lines: equal, or where the difference starts, modules to blame and likely causes."""
    failed = [gate for gate in result.gates if not gate.passed]
    if not failed:
        worst = max((gate.error for gate in result.gates if gate.id == "P1"), default=0.0)
        lines = [f"the same function: {len(result.gates)} gates passed, worst float64 error {worst:.1e}"]
        return "\n".join([*lines, *assumed(result), *result.notes])
    lines = [f"NOT the same function: {len(failed)} of {len(result.gates)} gates failed"]
    lines += [f"  {gate.id} {gate.what}: {gate.error:.1e} over {gate.limit:.1e} {gate.where}" for gate in failed]
    if result.starts:
        lines.append(f"the difference starts at {named(result, result.starts)}")
    blamed = {each.module: each for each in reversed(result.blamed)}
    modules = sorted(list(blamed.values())[::-1], key=lambda each: each.module not in result.causes)
    for each in modules[:MAX_BLAMED]:
        lines.append(f"a cause is in {named(result, each.module)}: {each.part}, {each.error:.1e} by itself")
        lines += [f"  likely: {result.causes[each.module]}"] if each.module in result.causes else []
    if len(blamed) > MAX_BLAMED:
        lines.append(f"and {len(blamed) - MAX_BLAMED} more modules differ by themselves")
    lines += [f"likely cause: {words}" for module, words in result.causes.items() if module not in blamed]
    if not result.causes:
        is_gradient = not blamed and all("gradients" in gate.what for gate in failed if not _is_step(gate))
        is_gradient = is_gradient and any("gradients" in gate.what for gate in failed)
        lines.append(GRADIENTS if is_gradient else "likely cause: none of the known ones explains it")
    return "\n".join([*lines, *assumed(result), *result.notes])


def _is_step(gate: Any) -> bool:
    """True for a gate of optimiser steps, which follow the gradients."""
    return gate.what.startswith(("losses of optimiser steps", "parameters after", "updates of"))


def assumed(result: Any) -> list[str]:
    """Return a sentence on assumed matches, where neither names nor values tell weights of one shape apart."""
    guesses = result.weights.assumed
    if not guesses:
        return []
    shown = ", ".join(f"{guess.name} = {guess.rule.text()} (by {guess.why})" for guess in guesses[:MAX_ASSUMED])
    more = f" and {len(guesses) - MAX_ASSUMED} more" if len(guesses) > MAX_ASSUMED else ""
    return [f"assumed, because others have that shape and names do not decide (names= does): {shown}{more}"]


def named(result: Any, module: str) -> str:
    """Return a JAX module's name, with its PyTorch name where that differs."""
    other = result.modules.get(module)
    return f"{module} ({other} in PyTorch)" if other and other != module else module


def weights_rows(result: Any) -> list[tuple[str, str, str]]:
    """Return (JAX array, what it is made from, why) for every guess."""
    return [
        (guess.name, guess.rule.text() if isinstance(guess.rule, Rule) else "a function by hand", guess.why)
        for guess in result.weights.guesses
    ]


def left_out(result: Any) -> list[str]:
    """Return sentences on weights that have no counterpart."""
    matching = result.weights
    pairs = (("PyTorch tensors that the JAX model does not have", matching.ignored),
             ("state of the JAX model that PyTorch does not have, kept as it was", matching.kept))  # fmt: skip
    return [f"{what}: {', '.join(names)}" for what, names in pairs if names]


def as_dict(result: Any, *, name: str) -> dict[str, Any]:
    """Return the result as plain values, for JSON; the keys are those of a parity case, plus the weights."""
    rows = {kind: {e.name: e.error for e in each.entries} for kind, each in result.comparisons.items()}
    modules = next((rows[kind] for kind in rows if kind.startswith("modules")), {})
    own: dict[str, float] = {}
    for entry in result.local:
        own[entry.module] = max(entry.error, own.get(entry.module, 0.0))
    first = result.blamed[0].as_dict() if result.blamed else None
    notes = [*left_out(result), *assumed(result), *result.notes]
    failures = {gate.what: gate.where for gate in result.gates if not gate.passed}
    return {
        "case": name, "backend": result.framework, "passed": result.passed, "causes": result.causes,
        "worst": max((gate.error for gate in result.gates if gate.id == "P1"), default=0.0),
        "gates": [gate._asdict() for gate in result.gates], "first_divergence": result.starts,
        "first_divergence_backward": None, "first_divergence_by_kind": failures, "blame": first,
        "layers": [{"module": each, "float64": error, "own": own.get(each)} for each, error in modules.items()],
        "weights": weights_rows(result), "notes": notes, "modules": result.modules,
    }  # fmt: skip


def show(result: Any, *, name: str = "pair", console: Any = None) -> None:
    """Print the matched weights, the gates, every module and the verdict."""
    from rich import box
    from rich.table import Table

    console = console or terminal.console()
    table = Table(title="weights", box=box.SIMPLE_HEAD)
    for title in ("JAX", "PyTorch", "because"):
        table.add_column(title, overflow="fold")
    rows = weights_rows(result)
    for row in rows[:MAX_WEIGHTS]:
        table.add_row(*row)
    if len(rows) > MAX_WEIGHTS:
        table.add_row(f"and {len(rows) - MAX_WEIGHTS} more", "", "")
    console.print(table)
    for sentence in left_out(result):
        console.print(sentence, markup=False)
    report.show(as_dict(result, name=name), console)
    console.print(text(result), style="green" if result.passed else "bold red", markup=False, highlight=False)


def write_page(path: str | Path, result: Any, *, name: str) -> None:
    """Write one self-contained HTML page atomically."""
    values = as_dict(result, name=name)
    figures = {"chart-modules": report.heat_map(values)} if values["layers"] else {}
    sections = (page.Section("verdict", "Verdict"), page.Section("modules", "Modules", bool(figures)),
                page.Section("weights", "Weights"))  # fmt: skip
    own = {"result": values, "verdict": text(result), "template": Path(__file__).with_suffix(".html")}
    outputs.write_text(path, page.render(f"{name}: {values['backend']} against torch", sections, figures, **own))
