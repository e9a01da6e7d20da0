"""A run's primary series in a document: written between its marks, and checked to be current."""

import json
from types import SimpleNamespace

import pytest

from jaxbench import cli, outputs
from jaxbench.regress import history, history_commands, run_file, tables, trees
from tests.regress.records import LOAD, RATE, finding, quiet, record

EMPTY = f"# Title\n\n{tables.BEGIN}\n{tables.END}\n\nafter\n"


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "a.md"
    path.write_text(EMPTY)
    return path


def test_a_rise_from_0_is_infinite_also_where_a_file_has_null():
    risen = finding(RATE, "regression", "critical", float("inf"), low=float("inf"), high=float("inf"))
    risen = risen._replace(base=0.0, head=3.0)
    run = json.loads(json.dumps(outputs.finite(record([risen, *quiet()[1:]]))))
    assert "| was 0 | regression, critical |" in tables.table(run, "r")


def test_names_of_series_cannot_break_a_table():
    named = record(quiet(), findings=[], sides={"head": {"commit": "c"}}, series={"a|<b>": {"head": {"median": 1.0}}})
    made = tables.table(named | {"suite": {}, "units": {"a|<b>": ["s", False]}}, "r1")
    assert "| a\\|&lt;b&gt; | 1 s |" in made


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return `history table` as a function of its flags, over a history of one run."""
    history.History(tmp_path / "h").add(record(quiet()))

    def call(**values):
        given = {"history": str(tmp_path / "h"), "run": "latest", "file": None, "check": False} | values
        monkeypatch.setattr(history_commands, "VALUES", SimpleNamespace(**given))
        return history_commands.table()

    return call


def test_a_table_has_the_primary_series_their_verdicts_and_what_they_ran_on():
    made = tables.table(record([finding(RATE, "regression", "critical", 0.4), *quiet()[1:]]), "r1")
    assert f"| {RATE} | 10 tokens/s | 14 tokens/s | +40.0 [+38.0, +42.0] % | regression, critical |" in made
    ran = "suite quick, 5 pairs of launches, 2026-11-26, A, 2 threads, cpu, jax 0.10.2."
    assert LOAD not in made and made.endswith(f"Run `r1`: `{'c' * 12}` beside `{'b' * 12}`, {ran}")


def test_a_run_without_a_base_has_medians_and_launches():
    made = tables.table(record(quiet(), findings=[], sides={"head": {"commit": "c"}}), "r1")
    assert f"| {RATE} | 10 tokens/s | 3 | 9 tokens/s to 11 tokens/s |" in made and "beside" not in made


def test_a_run_that_lost_its_primary_series_has_no_table():
    with pytest.raises(ValueError, match="run r1 has none of its primary series, 1 series in all"):
        tables.table(record([finding(LOAD)]), "r1")


def test_writing_changes_what_is_between_the_marks_alone_and_twice_is_once(document):
    assert tables.write(document, "| a |") and not tables.write(document, "| a |")
    assert document.read_text() == f"# Title\n\n{tables.BEGIN}\n\n| a |\n\n{tables.END}\n\nafter\n"
    assert tables.is_current(document, "| a |") and not tables.is_current(document, "| b |")


@pytest.mark.parametrize(
    "text",
    [
        "no marks\n",
        f"{tables.BEGIN}\n",
        f"{tables.END}\n{tables.BEGIN}\n",
        f"{tables.BEGIN}\n{tables.END}\n" * 2,
    ],
)
def test_a_document_without_one_place_for_the_table_is_refused_and_left_alone(text, document):
    document.write_text(text)
    with pytest.raises(ValueError, match="a.md has . lines .* wanted one each, in this order"):
        tables.write(document, "| a |")
    assert document.read_text() == text


def test_the_command_prints_writes_and_checks(command, document, capsys):
    assert command() == cli.EXIT_OK and f"| {RATE} |" in capsys.readouterr().out
    with pytest.raises(cli.GateFailed, match="has another table than run latest"):
        command(file=str(document), check=True)
    assert document.read_text() == EMPTY
    for said in ("written", "was current"):
        assert command(file=str(document)) == cli.EXIT_OK and said in capsys.readouterr().out
    assert command(file=str(document), check=True) == cli.EXIT_OK and "is current" in capsys.readouterr().out


def test_a_run_may_be_named_by_its_file_so_that_a_committed_one_is_checked_anywhere(command, tmp_path, capsys):
    [path] = history.History(tmp_path / "h").files()
    copy = tmp_path / "run.json"
    copy.write_bytes(path.read_bytes())
    assert command(run=str(copy), history=str(tmp_path / "none")) == cli.EXIT_OK
    assert "Run `run`" in capsys.readouterr().out


@pytest.mark.parametrize(("document", "suite"), [("docs/performance_history.md", "quick"), ("README.md", "standard")])
def test_the_table_of_a_document_is_that_of_the_run_that_is_committed(document, suite):
    runs = (trees.ROOT / "experiments" / "results" / "2026-11-26-performance-history").glob("*.json")
    [(path, found)] = [(path, run) for path in runs if (run := run_file.read(path))["suite_name"] == suite]
    assert tables.is_current(trees.ROOT / document, tables.table(found, path.stem))
