"""A pair's result in words and tables."""

from __future__ import annotations

from typing import Any

from jaxbench import terminal

MAX_WEIGHTS = 40  # rows of the weights' table on a terminal


def text(result: Any) -> str:
    """Verdict in a few lines."""
    failed = [gate for gate in result.gates if not gate.passed]
    if not failed:
        worst = max((gate.error for gate in result.gates if gate.id == "P1"), default=0.0)
        lines = [f"the same function: {len(result.gates)} gates passed, worst float64 error {worst:.1e}"]
    else:
        lines = [f"NOT the same function: {len(failed)} of {len(result.gates)} gates failed"]
        lines += [f"  {gate.id} {gate.what}: {gate.error:.1e} over {gate.limit:.1e} {gate.where}" for gate in failed]
    if failed and result.starts:
        lines.append(f"the difference starts at {result.starts}{_twin(result, result.starts)}")
    if result.blame is not None:
        error = f"{result.blame.error:.1e} by itself"
        lines.append(
            f"the cause is in {result.blame.module}{_twin(result, result.blame.module)}: {result.blame.part}, {error}"
        )
    if failed and result.cause:
        lines.append(f"likely cause: {result.cause}")
    return "\n".join([*lines, *result.notes])


def _twin(result: Any, name: str) -> str:
    other = result.modules.get(name)
    return f" ({other} in PyTorch)" if other and other != name else ""


def show(result: Any, console: Any = None) -> None:
    """Print the weights' guesses, the gates and the verdict."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = console or terminal.console()
    weights = Table(title="weights", box=box.SIMPLE_HEAD)
    for name in ("JAX", "PyTorch", "because"):
        weights.add_column(name, overflow="fold")
    for guess in result.weights.guesses[:MAX_WEIGHTS]:
        rule = guess.rule.text() if hasattr(guess.rule, "text") else "function by hand"
        weights.add_row(guess.name, rule, guess.why)
    if len(result.weights.guesses) > MAX_WEIGHTS:
        weights.add_row(f"and {len(result.weights.guesses) - MAX_WEIGHTS} more", "", "")
    console.print(weights)
    if result.weights.ignored:
        console.print(f"not in the JAX model: {', '.join(result.weights.ignored)}")
    table = Table(title="gates", box=box.SIMPLE_HEAD)
    for name in ("gate", "what", "", "error", "limit", "where"):
        table.add_column(name, overflow="fold")
    for gate in result.gates:
        verdict = Text("pass", "green") if gate.passed else Text("FAIL", "bold red")
        table.add_row(gate.id, gate.what, verdict, f"{gate.error:.1e}", f"{gate.limit:.1e}", gate.where)
    console.print(table)
    console.print(Text(text(result), style="green" if result.passed else "bold red"))
