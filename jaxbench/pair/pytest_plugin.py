"""pytest: `same_function(jax_side, torch_module, inputs)` as a fixture, and a readable section where it fails (S file).

The plugin is found where jaxbench is installed (entry point pytest11); it imports neither framework by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

REPORTS = pytest.StashKey[list[str]]()


@pytest.fixture
def same_function(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """jaxbench.assert_same_function whose weights and modules are shown where it fails; returns the result."""

    def check(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        import jaxbench

        result = jaxbench.compare(*args, **options)
        if not result.passed:
            request.node.stash.setdefault(REPORTS, []).append(_tables(result))
            pytest.fail(str(result), pytrace=False)
        return result

    return check


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Add the tables of failed comparisons to a test's report."""
    outcome = yield
    for text in item.stash.get(REPORTS, []) if call.when == "call" else ():
        outcome.get_result().sections.append(("jaxbench: weights and modules", text))


def _tables(result: Any) -> str:
    """Tables of a result as plain text."""
    import io

    from rich.console import Console

    from jaxbench.pair import report

    console = Console(file=io.StringIO(), width=120, no_color=True)
    report.show(result, console=console)
    return console.file.getvalue()
