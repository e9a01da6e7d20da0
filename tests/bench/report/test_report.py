"""The report: the numbers that were measured, in every format, offline."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
import rich.console

from jaxbench import outputs
from jaxbench.bench import labels
from jaxbench.bench.report import contents, figures, page, picture, report
from jaxbench.bench.suite import Suite
from jaxbench.measure.records import Record, Workload

DECODE = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=64, new_tokens=48)
TRAIN = Workload(kind="train", dtype="float32", batch=2, prompt_tokens=128)
SLICE = Workload(kind="train", dtype="bfloat16", batch=8, prompt_tokens=512)
SUITE = Suite(arms=("flax", "torch_eager", "transformers"))
# Rates of three launches: Flax twice the baseline, transformers not to be told from it.
RATES = {"flax": (60.0, 62.0, 61.0), "torch_eager": (30.0, 31.0, 30.5), "transformers": (25.0, 37.0, 30.0)}


def measured() -> list[Record]:
    """Return the records of a small comparison with every kind of outcome."""
    found = []
    for arm, rates in RATES.items():
        for launch, rate in enumerate(rates, start=1):
            common = {
                "arm": arm,
                "launch": launch,
                "config_id": "cafe",
                "device": "cpu",
                "time_utc": "2026-11-21T10:00",
            }
            detail = {"share_of_roofline": rate / 100}
            row = {"metric": "decode_tokens_per_s", "unit": "tokens/s", "workload": DECODE, "detail": detail}
            found.append(Record(value=rate, samples=(rate, rate), **row, **common))
            memory = {"metric": "peak_memory_bytes", "unit": "bytes", "workload": DECODE, "value": 2.0**30}
            found.append(Record(**memory, **common))
            workload = Workload(kind="load", dtype="float32")
            found.append(Record(metric="load_s", value=1.5, unit="s", workload=workload, **common))
            found.append(Record(metric="tokens", workload=DECODE, value=1.0, detail={"digest": "d1"}, **common))
    reason = "no <train> step & no reason"
    found.append(Record(metric="parity", arm="equinox", status="error", reason="took longer than 300 s"))
    found.append(Record(metric="train_tokens_per_s", arm="transformers", workload=TRAIN, launch=1, status="skipped",
                        reason=reason, config_id="cafe"))  # fmt: skip
    return found + proofs()


def proofs() -> list[Record]:
    """Return a parity record and one compiled TPU program."""
    layers = [{"module": "embed", "float64": 0.0}]
    layers += [{"module": f"layers.{i}.mlp", "float64": 10.0 ** (i - 16)} for i in range(3)]
    gate = {"id": "P1", "what": "outputs, float64", "passed": True, "error": 1e-14, "limit": 1e-9, "where": "layers.2"}
    parity = {"passed": True, "worst": 1e-14, "case": "transformer/smollm2", "layers": layers, "gates": [gate]}
    slice_of = {"workload": SLICE, "device": "v5e:2x2", "config_id": "cafe"}
    shape = {"num_chips": 4, "num_layers": 30, "model_axis": 1}
    times = {"compute_s": 0.004, "memory_s": 0.003, "interconnect_s": 0.001, "bound": "compute",
             "tokens_per_s": 1024000.0, "chip": "v5e", "source": "docs.cloud.google.com/tpu/docs/v5e"}  # fmt: skip
    details = {
        "tpu_memory_bytes": (2.0**31, {"fits": True, "hbm_bytes": 2**34} | shape),
        "tpu_flops": (9.5e11, {"compiled_over_analytic": 1.013} | shape),
        "tpu_traffic_bytes": (8.0e8, shape),
        "tpu_collective_bytes": (1.9e8, {"kinds": {"all-gather": {"count": 212}}} | shape),
        "tpu_roofline_s": (0.004, times | shape),
    }
    found = [Record(metric=name, value=value, detail=detail, **slice_of) for name, (value, detail) in details.items()]
    return found + [Record(metric="parity", arm="flax", value=1e-14, unit="ratio", detail=parity, config_id="cafe")]


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    facts = {
        "cpu": "Test CPU 9000",
        "threads": 2,
        "settings": ["Every arm runs on 2 threads."],
        "versions": {"jax": "0"},
    }
    (folder / "environment.json").write_text(json.dumps(facts))
    return contents.gather(measured(), SUITE, folder)


@pytest.fixture(scope="module")
def html(view):
    return page.render(view)


def text_of(html: str) -> str:
    """Return the page without scripts, styles and tags."""
    body = re.sub(r"<(script|style)>.*?</\1>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_page_shows_the_measured_numbers_verdicts_and_reasons(html):
    text = text_of(html)
    for shown in ("61.0 tokens/s", "30.5 tokens/s", "2.00 [", "1.00 GiB", "Test CPU 9000", "1.0e-14", "2.00 GiB",
                  "950 GFLOP", "1.013", "4.00 ms", "212 all-gather", "Every arm runs on 2 threads.", "cafe",
                  "docs.cloud.google.com/tpu/docs/v5e"):  # fmt: skip
        assert shown in text, shown
    assert "no &lt;train&gt; step &amp; no reason" in html, "reasons are escaped"


def test_page_lists_undecided_rows(view, html):
    assert ("transformers", "decode_tokens_per_s") in [(row.arm, row.metric) for row in contents.undecided(view)]
    listed = html.split('<section id="open">')[1].split("</section>")[0]
    assert "decode: float32, batch 1, 64 + 48 tokens, HF transformers" in listed
    assert "parity, Equinox: took longer than 300 s" in listed


def test_page_loads_nothing_from_elsewhere(html):
    markup = re.sub(r"<(script|style)>.*?</\1>", " ", html, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", markup)
    assert "<link" not in markup and "<script src" not in html and "@import" not in html
    assert "Plotly" in html and len(html) > 2_000_000, "plotly's script is inside"


def test_charts_hold_the_ratio_of_each_verdict(view, html):
    chart = figures.forest(view)
    by_name = {trace["name"]: trace for trace in chart["data"]}
    assert by_name["faster"]["x"] == pytest.approx([2.0], rel=0.01)
    assert "undecided" in by_name and len(by_name["faster"]["y"]) == 1
    embedded = json.loads(re.search(r"const FIGURES = (.*?);\n", html).group(1))
    assert embedded["chart-ratios"]["data"][0]["x"] == by_name["faster"]["x"]
    assert {"chart-roofline", "chart-startup", "chart-memory", "chart-tpu", "chart-parity-flax"} <= embedded.keys()


def test_heat_map_colours_by_power_of_ten(view):
    trace = figures.heat_map(view.parity["flax"])["data"][0]
    assert [line[0] for line in trace["z"]] == pytest.approx([-16, -15, -14])
    assert trace["y"] == ["layer 0", "layer 1", "layer 2"] and trace["x"] == ["mlp"]
    assert figures.heat_map({"layers": []}) is None


def test_launches_whose_single_rows_took_plain_products_are_counted(tmp_path):
    found = [
        Record(
            metric="decode_tokens_per_s", arm=arm, value=1.0, launch=launch, workload=DECODE, detail={"single_row": how}
        )
        for arm, taken in (("torch_eager", ("plain", "packed", "plain")), ("torch_compile", ("packed",) * 3))
        for launch, how in enumerate(taken, 1)
    ]
    notes = contents.product_notes(contents.gather(found, Suite(arms=("torch_eager", "torch_compile")), tmp_path))
    assert notes == [f"PyTorch eager, {DECODE.dtype}: single rows took plain products in 2 of 3 launches"]


def test_programs_that_differ_are_named(tmp_path):
    rows = [("flax", 10.0, 7.0), ("equinox", 10.0, 8.0)]
    found = []
    for arm, flops, temp in rows:
        common = {"arm": arm, "launch": 1, "workload": DECODE}
        found += [Record(metric="flops", value=flops, **common), Record(metric="temp_bytes", value=temp, **common)]
    suite = Suite(arms=("flax", "equinox", "torch_eager"))
    notes = contents.program_notes(contents.gather(found, suite, tmp_path))
    assert notes[0].endswith("1 of 2 figures agree")
    assert notes[1] == f"compiled temp bytes, {labels.full(DECODE)}: Flax 7, Equinox 8"


def test_csv_keeps_full_precision(view, tmp_path):
    outputs.write_csv(tmp_path / "results.csv", report.csv_rows(view), report.CSV_COLUMNS)
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    flax = next(line for line in lines if line["arm"] == "flax" and line["metric"] == "decode_tokens_per_s")
    row = next(row for row in view.rows if row.arm == "flax" and row.metric == "decode_tokens_per_s")
    assert float(flax["value"]) == row.value == 61.0
    assert tuple(float(flax[name]) for name in ("ratio", "ratio_low", "ratio_high")) == row.ratio
    assert (flax["verdict"], flax["batch"], flax["launches"]) == ("faster", "1", "3")
    tpu = next(line for line in lines if line["metric"] == "tpu_flops")
    assert (tpu["device"], float(tpu["value"])) == ("v5e:2x2", 9.5e11)
    skipped = next(line for line in lines if line["metric"] == "train_tokens_per_s")
    assert skipped["value"] == "" and skipped["reason"] == "no <train> step & no reason"


def test_the_terminal_says_in_full_why_a_cell_is_empty(view):
    console = rich.console.Console(file=io.StringIO(), width=200)
    report.show(view, console=console)
    text = console.file.getvalue()
    assert (
        "not measured: HF transformers, train step: float32, batch 2, 128 tokens: no <train> step & no reason" in text
    )
    assert text.count("not measured") == 2  # in its cell too, and nothing of proofs


def test_picture_is_well_formed_and_shows_each_rate(view):
    root = ElementTree.fromstring(picture.draw(view))
    words = [element.text for element in root.iter() if element.text]
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"61.0", "30.5", "30.0", "Flax NNX", "Decode, batch 1"} <= set(words)
    widths = [float(bar.get("width")) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01), "bars are as long as their rates"


def test_headline_names_rate_peer_proof_and_verdicts(view):
    figures_shown = [card[0] for card in contents.headline(view)]
    assert figures_shown == ["61.0 tokens/s", "2.03×", "2.00×", "1.0e-14", "1 / 0 / 0"]


def test_write_leaves_every_file_and_no_temporary_one(tmp_path, capsys):
    for _ in range(2):  # a second report replaces the first
        report.write(measured(), SUITE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "picture.svg", "report.html", "results.csv", "tensorboard",
    ]  # fmt: skip
    events = list((tmp_path / "tensorboard").iterdir())
    assert len(events) == 1 and b"decode_tokens_per_s/decode_float32_b1_p64_n48/flax" in events[0].read_bytes()
    printed = capsys.readouterr().out
    assert "61.0 tokens/s" in printed and "1 faster" in printed and "v5e:2x2" in printed


def test_scalars_lie_at_the_numbers_of_their_launches(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "tensorboardX.SummaryWriter.add_scalar", lambda _, name, value, step: steps.append((name, step))
    )
    found = [record for record in measured() if record.launch != 1 or record.arm != "flax"]
    report.write_scalars(contents.gather(found, SUITE, tmp_path), tmp_path / "tensorboard")
    flax, torch_eager = (
        [step for name, step in steps if name == f"decode_tokens_per_s/decode_float32_b1_p64_n48/{arm}"]
        for arm in ("flax", "torch_eager")
    )
    assert torch_eager[0] == 1 and flax == torch_eager[1:]


def test_an_interrupted_run_without_records_still_reports(tmp_path):
    report.write([], SUITE, tmp_path)
    assert "Settings and environment" in (tmp_path / "report.html").read_text()
    ElementTree.fromstring((tmp_path / "picture.svg").read_text())


@pytest.mark.parametrize(
    ("number", "unit", "shown"),
    [
        (0.00064, "s", "0.640 ms"), (2.0, "s", "2.00 s"), (1234.5, "tokens/s", "1,230 tokens/s"),
        (269030016, "bytes", "257 MiB"), (9.5e11, "FLOP", "950 GFLOP"), (4.86e10, "bytes/s", "48.6 GB/s"),
        (0.0, "bytes", "0 B"), (None, "s", "-"), (float("inf"), "s", "-"), (68.04, "", "68.0"),
    ],
)  # fmt: skip
def test_values_have_three_significant_digits(number, unit, shown):
    assert labels.value(number, unit) == shown


@pytest.mark.parametrize(
    ("triple", "shown"),
    [
        ((2.51, 2.4, 2.63), "2.51 [2.40, 2.63]"), ((0.93, 1.9e-6, 456864.72), "0.93 \u2013"),
        ((3.0, 0.0, math.inf), "3.00 \u2013"),
    ],
)  # fmt: skip
def test_an_interval_without_information_is_a_dash(triple, shown):
    assert labels.ratio(triple) == shown


def test_an_interval_without_information_is_a_dash_everywhere_and_stays_a_number_in_the_csv(tmp_path, capsys):
    common = {"metric": "decode_tokens_per_s", "unit": "tokens/s", "workload": DECODE}
    rates = {"torch_eager": (30.0, 30.0), "flax": (60.0, 300.0)}
    found = [
        Record(arm=arm, launch=n, value=rate, samples=(rate,), **common)
        for arm, values in rates.items()
        for n, rate in enumerate(values, start=1)
    ]
    view = report.write(found, SUITE, tmp_path)
    [row] = [row for row in view.rows if row.ratio]
    assert row.verdict == "undecided" and row.ratio[1] < 0.01 and row.ratio[2] > 1e4
    assert "? 4.47 \u2013" in capsys.readouterr().out
    assert "4.47 \u2013" in text_of((tmp_path / "report.html").read_text())
    [trace] = figures.forest(view)["data"]
    assert trace["error_x"]["array"] == trace["error_x"]["arrayminus"] == [0]
    line = next(
        line for line in csv.DictReader((tmp_path / "results.csv").read_text().splitlines()) if line["arm"] == "flax"
    )
    assert (float(line["ratio_low"]), float(line["ratio_high"])) == row.ratio[1:]


def test_workloads_read_as_sentences():
    assert labels.full(DECODE) == "decode, float32, batch 1, 64 + 48 tokens"
    assert labels.short(DECODE) == "float32 b1 64+48"
    assert figures.heading("decode_tokens_per_s", DECODE) == "decode: float32, batch 1, 64 + 48 tokens"
    assert figures.heading("first_token_s", DECODE) == "first token: decode, float32, batch 1, 64 + 48 tokens"
