"""The report says which launches a row lacks and whether launches were added; it reports no run without records."""

import io
import json

import pytest
import rich.console

from jaxbench.bench.report import contents, page, report
from jaxbench.bench.suite import Suite
from jaxbench.measure.records import LAUNCH_DONE, LOOK, Record, RecordFile, Workload
from tests.bench.report.test_report import text_of

DECODE = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=64, new_tokens=48)
TRAIN = Workload(kind="train", dtype="float32", batch=2, prompt_tokens=128)
SUITE = Suite(arms=("flax", "equinox", "torch_eager"), rounds={"fewer": {"equinox": 1}})


def measured(lost=()) -> list[Record]:
    """Return the records of three launches, without the rates of the (arm, launch) that are lost."""
    found = [Record(metric=LAUNCH_DONE, value=float(launch), launch=launch) for launch in (1, 2, 3)]
    for arm in SUITE.arms:
        for launch in range(1, 2 if arm == "equinox" else 4):
            for workload in (DECODE, TRAIN) if (arm, launch) not in lost else ():
                rate = {"metric": f"{workload.kind}_tokens_per_s", "unit": "tokens/s", "workload": workload}
                found.append(Record(value=30.0 + launch, samples=(30.0 + launch,), arm=arm, launch=launch, **rate))
    return found


def shown(view) -> tuple[str, str]:
    """Return the terminal's text and the page's."""
    console = rich.console.Console(width=600, record=True, file=io.StringIO())
    report.show(view, console=console)
    return console.export_text(), text_of(page.render(view))


def test_a_launch_that_a_row_lacks_is_named_with_its_reason(tmp_path):
    """Its process died in another workload, so that the rates have no record of that launch at all."""
    died = Record(metric="prefill_tokens_per_s", arm="flax", launch=2, status="error", reason="worker died [signal 9]")
    view = contents.gather([*measured(lost=[("flax", 2)]), died], SUITE, tmp_path)
    said = (
        "Flax NNX, launch 2 lacks decode: float32, batch 1, 64 + 48 tokens, and 1 more, so that its rows are of "
        "fewer launches (worker died [signal 9])"
    )
    assert contents.lost_launches(view) == [said]
    assert all(said in text for text in shown(view))
    assert contents.lost_launches(contents.gather(measured(), SUITE, tmp_path)) == []  # equinox wants one alone


@pytest.mark.parametrize("looks", [(), (3,), (2, 3)])
def test_verdicts_of_a_run_that_was_reported_before_say_what_that_costs(tmp_path, looks):
    marks = [Record(metric=LOOK, value=3.0, detail={"launches": list(looks)})] if looks else []
    view = contents.gather([*measured(), *marks], SUITE, tmp_path)
    for text in shown(view):
        assert ("reported after 2 launches, and now after 3" in text) == (len(looks) == 2)
        assert ("in any of 2 reports is up to 10 %, not 5 %" in text) == (len(looks) == 2)


@pytest.mark.parametrize("others", [0, 2])
def test_a_folder_without_the_records_of_its_run_is_refused_so_that_its_csv_stays(tmp_path, others):
    """Committed folders may keep results.csv alone; a report of no record replaced it by its header."""
    about = {"run_id": "beef", "config_id": "cafe", "suite": SUITE.model_dump(mode="json")}
    (tmp_path / "suite.json").write_text(json.dumps(about))
    if others:
        RecordFile(tmp_path / "results.jsonl").append(*measured()[:others])
    held = "has 2 records, none" if others else "is not there, nothing"
    with pytest.raises(ValueError, match=f"report: .*results.jsonl {held} of the run of suite.json .run_id='beef'"):
        report.read_run(tmp_path)


def test_a_report_of_absurd_values_is_written(tmp_path):
    """Quotients of such rates overflow, and their ratios underflow to 0."""
    rates = {"torch_eager": (1e300, 5e-324, 1e300), "flax": (5e-324, 1e300, 1e-300), "equinox": (0.0,)}
    found = [
        Record(metric="decode_tokens_per_s", unit="tokens/s", workload=DECODE, arm=arm, launch=n, value=rate,
               samples=(rate,))
        for arm, values in rates.items() for n, rate in enumerate(values, start=1)
    ]  # fmt: skip
    view = report.write(found, SUITE, tmp_path, console=rich.console.Console(file=io.StringIO()))
    assert "report.html" in {path.name for path in tmp_path.iterdir()} and len(view.rows) == 3


def test_rows_in_which_a_pytorch_arm_is_faster_come_first_and_name_the_fastest(tmp_path):
    """Verdicts are beside one baseline; a rival asks for the fastest arm of his library, row by row."""
    arms = ("flax", "torch_eager", "torch_compile", "torch_native", "torch_int4")
    suite = Suite(arms=arms)
    values = {
        ("decode_tokens_per_s", DECODE): (50.0, 40.0, 80.0, 900.0, 900.0),
        ("first_token_s", DECODE): (2.0, 1.0, 1.5, 0.1, 0.1),
        ("train_tokens_per_s", TRAIN): (90.0, 30.0, 60.0, None, None),
    }
    found = [
        Record(metric=metric, workload=workload, value=value, samples=(value,), arm=arm, launch=1)
        for (metric, workload), row in values.items() for arm, value in zip(arms, row) if value is not None
    ]  # fmt: skip
    view = contents.gather(found, suite, tmp_path)
    assert [(round(ratio, 3), rival.arm) for ratio, _, rival in contents.against_fastest(view)] == [
        (0.5, "torch_eager"), (0.625, "torch_compile"), (1.5, "torch_compile"),
    ]  # fmt: skip
    said = "0.50 of PyTorch eager in first token: decode, float32, batch 1, 64 + 48 tokens; 0.62 of PyTorch compiled in"
    assert all(said in text for text in shown(view)) and "0.50×" in {card[0] for card in contents.headline(view)}
