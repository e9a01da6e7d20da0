"""Bad input of benchmarks.py: commands, suites, what to compare with, histories."""

from __future__ import annotations

import functools
import json

from tests.bad_input.harness import Case, case_of

RUN = ("benchmarks.py", "run")
of = functools.partial(case_of, RUN)
TINY, ONE = "--suite=tiny", "cases: [{name: a, workload: tokenizing}]\n"


def suite(text: str, *wanted: str) -> Case:
    """Return a case of a suite's text behind one good case."""
    return of("--suite=s.yaml", *wanted, s_yaml=ONE + text)


def cases_are(text: str, *wanted: str) -> Case:
    """Return a case of a suite with these cases."""
    return of("--suite=s.yaml", *wanted, s_yaml=f"cases: {text}\n")


def history(words: str, *wanted: str, **files: str) -> Case:
    """Return a case of a command of the history."""
    return case_of(("benchmarks.py", "history"), words, *wanted, **files)


def alerts(words: str, *wanted: str, **files: str) -> Case:
    """Return a case of a command of the alerts."""
    return case_of(("benchmarks.py", "alerts"), words, *wanted, **files)


def channels(text: str, *wanted: str) -> Case:
    """Return a case of a configuration of alerts."""
    return alerts("try|--alerts=a.yaml", *wanted, a_yaml=f"channels: {text}\n")


GATE = ("benchmarks.py", "gate")
MEASURED = json.dumps({
    "schema": 1, "time_utc": "2026-11-26T12:00:00+00:00", "host": "abc", "suite": {}, "device": "cpu", "launches": 2,
    "sides": {"head": {"commit": "c"}}, "findings": [], "machine": {}, "units": {"x": ["s", False]},
    "series": {"x": {"head": {"median": 0.5}}}, "notes": [],
})  # fmt: skip
TABLE = "table|--run=r.json"
SITE, DASHBOARD = ("benchmarks.py", "site"), ("benchmarks.py", "dashboard")
CASES = [
    Case("benchmarks.py rnu", ("'rnu' is no command", "nearest is run")),
    Case("benchmarks.py history lst", ("'lst' is no command", "nearest is list")),
    of("quick", "'quick' is not a flag"),
    of("--suit=tiny", "--suit", "nearest is --suite"),
    of("--suite=fast", "--suite=fast", "wanted one of nightly, quick, standard, tiny"),
    of("--suite=none.yaml", "none.yaml is no file"),
    of("--suite=", "--suite="),
    of("--suite=configs/lm/tiny.yaml", "configs/lm/tiny.yaml"),
    of("--suite=s.yaml", "s.yaml", s_yaml="cases: [1"),
    of("--suite=s.yaml", "s.yaml", s_yaml="- a\n"),
    of("--suite=s.yaml", "cases", s_yaml="model: tiny\n"),
    of(f"{TINY}|--set=rounds=0", "rounds", "0"),
    of(f"{TINY}|--set=rounds", "rounds"),
    of(f"{TINY}|--set=round=3", "nearest is rounds"),
    of(f"{TINY}|--set=looks=[5,3]", "looks=[5, 3]; wanted numbers of launches that rise"),
    of(f"{TINY}|--set=looks=[1]", "looks=[1]", "2 at least"),
    of(f"{TINY}|--set=alpha=0", "alpha", "0"),
    of(f"{TINY}|--set=alpha=0.5", "alpha", "0.5"),
    of(f"{TINY}|--set=sample_s=-1", "sample_s", "-1"),
    of(f"{TINY}|--set=confirm=-1", "confirm", "-1"),
    of(f"{TINY}|--set=timeout_s=0", "timeout_s", "0"),
    of(f"{TINY}|--set=threads=0", "threads", "0"),
    of(f"{TINY}|--set=threads=100000", "threads=100000, this process may use"),
    of(f"{TINY}|--set=requires.memory_bytes=1000000000000000", "requires.memory_bytes=1000000000000000"),
    of(f"{TINY}|--set=requires.device=tpu", "requires.device=tpu, this run is on cpu"),
    of(f"{TINY}|--set=requires.device=fpga", "device", "fpga"),
    of(f"{TINY}|--set=model=none.gguf", "none.gguf does not exist"),
    of(f"{TINY}|--device=fpga", "--device", "fpga"),
    of(f"{TINY}|--device=tpu", "--device=tpu"),
    of(f"{TINY}|--compare_with=no-such-commit", "--compare_with=no-such-commit: git knows no such commit"),
    of(f"{TINY}|--compare_with=--all", "--compare_with=--all: git knows no such commit"),
    of(f"{TINY}|--workdir=a.txt", "--workdir=a.txt cannot be a folder", a_txt="a"),
    suite("margins: {speed: {warning: 0.1, critical: 0.2}}\n", "margins.speed; wanted CASE.METRIC"),
    suite("margins: {timed: {warning: 0.3, critical: 0.2}}\n", "warning=0.3 is above critical=0.2"),
    suite(
        "margins: {first_token_s: {warning: 0.1, critical: 0.2, direction: higher}}\n",
        "direction=higher: lower is better",
    ),
    suite("margins: {timed: {warning: -1, critical: 0.2}}\n", "warning", "-1"),
    suite("limits: {a.speed: {least: 1}}\n", "limits.a.speed; wanted a.METRIC, metrics tokens_per_s"),
    suite("limits: {b.tokens_per_s: {least: 1}}\n", "limits.b.tokens_per_s; wanted CASE.METRIC, cases a"),
    suite("limits: {a: {least: 1}}\n", "limits.a; wanted a.METRIC"),
    suite("limits: {a.tokens_per_s: {}}\n", "limits.a.tokens_per_s", "are no bound; wanted one of them or both"),
    suite("limits: {a.tokens_per_s: {least: 3, most: 2}}\n", "limits.a.tokens_per_s", "least=3.0 is above most=2.0"),
    suite("limits: {a.tokens_per_s: {lest: 3}}\n", "limits.a.tokens_per_s.lest", "least"),
    suite("limits: {a.tokens_per_s: {least: .nan}}\n", "limits.a.tokens_per_s.least", "nan"),
    suite("limits: {a.tokens_per_s: 3}\n", "limits.a.tokens_per_s", "3"),
    suite("limits: {a.flops: {most: 3}}\n", "limits.a.flops; wanted a.PROGRAM.flops"),
    suite("limits: {a.step.load_s: {most: 3}}\n", "limits.a.step.load_s; wanted a.load_s"),
    suite("limits: {a.import_s: {most: 3}}\n", "limits.a.import_s; wanted start.import_s"),
    of(f"{TINY}|--set=limits={{bits.tokens_per_s: {{least: 3}}}}", "workload quality has no tokens/s"),
    of(f"{TINY}|--cases=speed", "--cases: 'speed' matches no case", "decode (generation), train (training), bits"),
    of(f"{TINY}|--cases=bits,spe*", "--cases: 'spe*' matches no case"),
    of(f"{TINY}|--cases=", "--cases: '' matches no case"),
    suite("primary: [a.speed]\n", "primary=a.speed; wanted CASE.METRIC, cases a"),
    suite("primary: [b.tokens_per_s]\n", "primary=b.tokens_per_s"),
    cases_are("[]", "cases"),
    cases_are("[{name: a, workload: singing}]", "workload", "singing"),
    cases_are("[{name: A b, workload: tokenizing}]", "name"),
    cases_are("[{name: a, workload: tokenizing}, {name: a, workload: quality}]", "cases.name=a is there twice"),
    cases_are("[{name: a, workload: generation, new_tokens: 1}]", "new_tokens", "1"),
    cases_are("[{name: a, workload: generation, dtype: int8}]", "dtype", "int8"),
    cases_are("[{name: a, workload: generation, batches: 3}]", "batches"),
    cases_are("[{name: a, workload: native, weights: q5_0}]", "weights", "q5_0"),
    cases_are("[{name: a, workload: native, weights: float32, activations: int8}]", "activations=int8 go with weights"),
    cases_are("[{name: a, workload: memory, kind: bank}]", "kind", "bank"),
    cases_are("[{name: a, workload: memory, chunk: 0}]", "chunk", "0"),
    cases_are("[{name: a, workload: detection, marked: -1}]", "marked", "-1"),
    cases_are("[{name: a, workload: detection, false_alarms: 1}]", "false_alarms", "1"),
    cases_are("[{name: a, workload: answers, windows: 2}]", "windows"),
    cases_are("[{name: a, workload: hallucination, context_tokens: 4}]", "context_tokens", "4"),
    cases_are("[{name: a, workload: serving, kernels: cuda}]", "kernels", "cuda"),
    cases_are("[{name: a, workload: serving, requests: 63, batch_tokens: 64}]", "batch_tokens=64; wanted 65 at least"),
    cases_are("[{name: a, workload: parity, row: transformer/lama}]", "'transformer/lama' is not a parity case"),
    cases_are("[{name: a, workload: parity, row: watermark/kgw}]", "row=watermark/kgw compares bits and counts"),
    cases_are("[{name: a, workload: parity, row: transformer/llama-kernel}]", "llama-kernel is for gpu alone"),
    case_of(("benchmarks.py", "qualify"), f"{TINY}|--launches=1", "--launches", "1"),
    case_of(("benchmarks.py", "qualify"), "--suite=standard|--launches=5", "--launches=5; wanted 10 at least"),
    case_of(("benchmarks.py", "qualify"), f"{TINY}|--drawn=0", "--drawn", "0"),
    history("show", "--run"),
    history("show|--run=latest", "'latest' names 0 runs", "the folder is empty"),
    history("show|--run=x|--histroy=h", "--histroy", "nearest is --history"),
    history("trend", "--series"),
    history("trend|--series=decode.speed", "metric 'speed' of 'decode.speed' is unknown"),
    history("trend|--series=decode.tokens_per_s", "--series=decode.tokens_per_s: no run of machine"),
    history("tag|--run=latest", "--tag"),
    history("tag|--run=latest|--tag=v1", "'latest' names 0 runs"),
    history("tag|--run=latest|--tag= ", "tag ' ' is empty; wanted another name"),
    history("prune|--dry_run=maybe", "--dry_run", "maybe"),
    history("backup", "--backup"),
    history("restore|--backup=none", "none holds no runs"),
    history("list|--history=a.txt", "--history=a.txt is a file", a_txt="a"),
    history("trend|--series=decode.tokens_per_s|--host=abc", "no run of machine abc on cpu"),
    history("import|--input=x.json", "--format"),
    history("import|--format=pytest-benchmark", "--input"),
    history("import|--format=asv|--input=x.json", "--format", "asv"),
    history("import|--format=pytest-benchmark|--input=x.json", "--input=x.json does not exist"),
    history("import|--format=pytest-benchmark|--input=x.json", "--input=x.json", "KeyError", x_json="{}"),
    history("import|--format=github-action-benchmark|--input=x.js", "--input=x.js", x_js="window.BENCHMARK_DATA = ["),
    history("import|--format=comparison|--input=x.jsonl", "--input=x.jsonl holds no run of comparison", x_jsonl=""),
    history("import|--format=comparison|--input=x.jsonl", "x.jsonl line 1 is not a record", x_jsonl="{}\n{}\n"),
    history("import|--format=figures|--input=none", "--input=none does not exist"),
    history("import|--format=figures|--input=x.json", "--input=x.json does not exist"),
    history("import|--format=figures|--input=x.json", "x.json is damaged: Expecting", x_json='{"a": 1'),
    history("import|--format=figures|--input=x.json", "x.json holds no run of figures", x_json='{"seed": 1}'),
    history("import|--format=figures|--input=x.jsonl", "x.jsonl is damaged: line 2 is no JSON", x_jsonl="{}\n{\n"),
    history("import|--format=figures|--input=x.csv", "row 1 has more fields than the header", x_csv="a\n1,2\n"),
    history("import|--format=figures|--input=configs/lm", "--input=configs/lm holds no run of figures"),
    Case(
        ("benchmarks.py", "history", "import", "--format=figures", "--input=d"),
        ("--input=d", "b.json is damaged"),
        {"d/a.json": '{"x": 1}', "d/b.json": ""},
    ),  # fmt: skip
    history("export", "--output"),
    history("export|--output=o.csv", "there is no run to export"),
    history("export|--output=o.csv", "o.csv exists; name another --output, or pass --overwrite", o_csv="x"),
    history("export|--history=h|--output=h/runs/r.csv|--overwrite", "--output=h/runs/r.csv is in --history=h"),
    history("tag|--run=latest|--tag=latest", "tag 'latest' is the newest run, whichever that is"),
    alerts("lst", "'lst' is no command", "nearest is list"),
    alerts("send", "--alerts is missing"),
    alerts("send|--alerts=none", "--alerts=none", "wanted one of local, team"),
    alerts("send|--alerts=local|--run=x", "'x' names 0 runs"),
    alerts("try|--alerts=team", "channel chat wants the variable JAXBENCH_WEBHOOK_URL, which is not set"),
    alerts("acknowledge", "--alert"),
    alerts("acknowledge|--alert=x", "'x' names 0; wanted one of none: there is no alert"),
    alerts("close|--alert=", "'' names 0"),
    channels("[]", "channels"),
    channels("[{name: a, kind: pigeon}]", "kind", "pigeon"),
    channels("[{name: a, kind: file}]", "path"),
    channels("[{name: a, kind: terminal}, {name: a, kind: terminal}]", "channels.name=a is there twice"),
    channels("[{name: a, kind: webhook, url_variable: 'https://x'}]", "url_variable"),
    channels("[{name: a, kind: webhook, url: 'https://x'}]", "url"),
    channels("[{name: a, kind: smtp, host: h, sender: nobody, recipients: [a@b]}]", "sender", "nobody"),
    channels("[{name: a, kind: smtp, host: h, sender: a@b, recipients: []}]", "recipients"),
    channels("[{name: a, kind: github, repository: jaxbench}]", "repository", "jaxbench"),
    channels("[{name: a, kind: terminal, least: mild}]", "least", "mild"),
    channels("[{name: a, kind: terminal}]\nquiet_hours: {start: '25:00', end: '07:00'}", "quiet_hours.start"),
    channels("[{name: a, kind: terminal}]\nquiet_hours: {start: '22:00', end: '07:00', timezone: X}", "timezone=X"),
    channels("[{name: a, kind: terminal}]\ntries: 0", "tries", "0"),
    of(f"{TINY}|--alerts=local|--nokeep", "--alerts=local: an alert names a run of the history"),
    of(f"{TINY}|--alerts=none.yaml", "none.yaml is no file"),
    of(f"{TINY}|--detailed_report=maybe", "--detailed_report", "maybe"),
    case_of(GATE, "--suite=fast", "--suite=fast", "wanted one of"),
    case_of(GATE, f"{TINY}|--compare_with=no-such-commit", "--compare_with=no-such-commit: git knows no such commit"),
    case_of(GATE, f"{TINY}|--workdir=a.txt", "--workdir=a.txt cannot be a folder", a_txt="a"),
    case_of(GATE, f"{TINY}|--history=a.txt", "--history=a.txt is a file", a_txt="a"),
    case_of(GATE, f"{TINY}|--device=fpga", "--device", "fpga"),
    history("table", "--run"),
    history("table|--run=latest", "'latest' names 0 runs"),
    history("table|--run=none.json", "'none.json' names 0 runs"),
    history(TABLE, "r.json is damaged or no run", r_json="{}"),
    history(TABLE, "run r has none of its primary series", r_json=MEASURED.replace('"x": {"head"', '"x": {"base"')),
    history(f"{TABLE}|--check", "--check=True wants --file", r_json=MEASURED),
    history(f"{TABLE}|--file=none.md", "--file=none.md cannot be read as text", r_json=MEASURED),
    history(f"{TABLE}|--file=d.md", "--file=d.md has 0 lines", "wanted one each", r_json=MEASURED, d_md="a\n"),
    history(f"{TABLE}|--file=d.md|--check", "--file=d.md has 0 lines", r_json=MEASURED, d_md="a\n"),
    history("backup|--backup=host::module", "--backup=host::module: wanted a folder, or [USER@]HOST:FOLDER"),
    history("restore|--backup=host:a b", "--backup=host:a b: wanted a folder, or [USER@]HOST:FOLDER"),
    history("backup|--backup=a.txt", "--backup=a.txt cannot be a folder", a_txt="a"),
    case_of(SITE, "", "holds no run that can be read"),
    case_of(SITE, "--output=a.txt", "--output=a.txt is there and no site of ours", a_txt="a"),
    case_of(SITE, "--parity=p.json", "p.json"),
    case_of(SITE, "--parity=p.json", "--parity=p.json is not what experiments/parity.py writes", p_json="{}"),
    case_of(DASHBOARD, "--port=70000", "--port", "70000"),
    case_of(DASHBOARD, "--host=0.0.0.0", "--host=0.0.0.0 can be reached from other machines"),
    case_of(DASHBOARD, "--host=no.such.host.invalid|--token_variable=HOME", "--token_variable=HOME"),
    case_of(DASHBOARD, "--token_variable=NO_SUCH_VARIABLE", "it holds 0 characters; wanted 16"),
    case_of(DASHBOARD, "--interval_s=0", "--interval_s", "0"),
]
