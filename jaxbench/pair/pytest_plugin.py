"""pytest plugin: fixture `same_function(jax_side, torch_module, inputs)` and a readable section on failure (S file).

pytest finds the plugin wherever jaxbench is installed (entry point pytest11). Loading it imports neither framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

REPORTS = pytest.StashKey[list[str]]()


@pytest.fixture
def same_function(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return jaxbench.assert_same_function as a check that returns its result and, on failure, shows the tables."""

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
    """Add the tables of failed comparisons to the test's report."""
    outcome = yield
    for text in item.stash.get(REPORTS, []) if call.when == "call" else ():
        outcome.get_result().sections.append(("jaxbench: weights and modules", text))


def _tables(result: Any) -> str:
    """Render the tables of a result as plain text."""
    import io

    from rich.console import Console

    from jaxbench.pair import report

    console = Console(file=io.StringIO(), width=120, no_color=True)
    report.show(result, console=console)
    return console.file.getvalue()
