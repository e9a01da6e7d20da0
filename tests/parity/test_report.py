"""The report: every layer on the terminal and on a page that opens offline; a failure names its module."""

import io

import pytest
from rich.console import Console

from jaxbench.parity import report


def gate(passed=True, where=""):
    error = 0.0 if passed else 0.5
    return {"id": "P1", "what": "outputs", "passed": passed, "error": error, "limit": 1e-9, "where": where, "note": ""}


def make(*, passed=True, modules=("embed", "layers.0.mlp", "layers.0", "model"), first=None, blame=None):
    rows = [{"module": name, "float64": 1e-16, "own": 0.0, "float32": None} for name in modules]
    return {
        "case": "transformer/<tiny>",
        "backend": "flax",
        "passed": passed,
        "worst": 1e-16,
        "gates": [gate(passed, first or "")],
        "layers": rows,
        "first_divergence": first,
        "first_divergence_backward": None,
        "first_divergence_by_kind": {"outputs": first} if first else {},
        "blame": blame,
    }


BLAME = {"module": "layers.0", "part": "input of layers.0.mlp", "error": 0.01}
BROKEN = make(passed=False, first="layers.0.mlp", blame=BLAME)


def printed(result):
    console = Console(file=io.StringIO(), width=120)
    report.show(result, console)
    return console.file.getvalue()


def test_the_terminal_shows_every_layer_and_gate():
    text = printed(make())
    assert all(name in text for name in ("embed", "layers.0.mlp", "model", "P1", "pass"))
    assert "equal, worst float64 error" in text and "FAIL" not in text


def test_a_failing_run_names_where_it_starts_and_the_cause():
    text = report.summary(BROKEN)
    assert "NOT equal" in text and "starts at layers.0.mlp" in text
    assert "the cause is in layers.0 (input of layers.0.mlp, 1.0e-02 by itself)" in text
    shown = printed(BROKEN)
    assert "layers.0.mlp <- starts here" in shown and "layers.0 <- cause" in shown and "FAIL" in shown


def test_a_failure_of_the_backward_pass_alone_is_said_so():
    result = make(passed=False) | {"first_divergence_backward": "layers.1.attention"}
    assert "in the backward pass, the difference starts at layers.1.attention" in report.summary(result)


def test_a_failure_outside_the_modules_names_its_gate():
    result = make(passed=False) | {"gates": [gate(False, "position 7")]}
    assert "first: outputs position 7" in report.summary(result)
    trained = make(passed=False) | {"first_divergence_by_kind": {"params_after_20_steps": "embed.embedding"}}
    assert "first: embed.embedding (params_after_20_steps)" in report.summary(trained)


def test_a_deep_model_shows_one_row_a_layer_with_its_worst_error():
    names = [f"layers.{i}.{part}" for i in range(40) for part in ("attention", "mlp")]
    result = make(modules=("embed", *names, "model"))
    result["layers"][2]["float64"] = 1e-3  # layers.0.mlp
    rows = report.layer_rows(result)
    assert [row["module"] for row in rows[:3]] == ["embed", "layers.0", "layers.1"] and len(rows) == 42
    assert rows[1]["float64"] == 1e-3 and rows[2]["float64"] == 1e-16


def test_columns_without_values_are_left_out():
    assert list(report.columns(make())) == ["float64", "own"]


def test_the_heat_map_has_a_cell_for_every_layer_and_kind():
    figure = report.heat_map(BROKEN)
    [cells] = figure["data"]
    assert len(cells["y"]) == 4 and len(cells["x"]) == 2
    assert cells["z"][0] == pytest.approx([-16.0, -17.0])
    assert "<b>layers.0.mlp</b> (starts here)" in cells["y"] and "<b>layers.0</b> (cause)" in cells["y"]


def test_the_page_is_self_contained_and_escapes_names(tmp_path):
    path = tmp_path / "out" / "parity.html"
    report.write_page(path, [make(), BROKEN])
    text = path.read_text()
    assert "Plotly.react" in text and '<script src="http' not in text and "<link" not in text
    assert text.count("plotly.js v") == 1  # the library once, for both figures
    assert "transformer/&lt;tiny&gt;" in text and "1 of 2 cases equal" in text
    assert '<td class="slower">FAIL' in text and "the cause is in layers.0" in text
    assert [entry.name for entry in path.parent.iterdir()] == ["parity.html"]


def test_gates_of_a_cases_own_are_told_by_the_one_nearest_to_its_limit():
    gates = [gate() | {"what": "words"}, gate() | {"what": "chi-square", "error": 3.0, "limit": 6.0}]
    result = make() | {"gates": gates, "layers": [], "worst": 3.0}
    assert report.summary(result).endswith(
        "equal, 2 gates passed; nearest to its limit: chi-square, 3.0e+00 of 6.0e+00"
    )
