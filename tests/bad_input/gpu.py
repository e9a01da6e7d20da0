"""Bad input of gpu.py: flags, stages, folders, results of earlier calls."""

from __future__ import annotations

import functools

from tests.bad_input.harness import Case, case_of

of = functools.partial(case_of, ("gpu.py", "--rehearse"))
bare = functools.partial(case_of, ("gpu.py",))


def bad_stages(content: str, *wanted: str) -> Case:
    """Return a case whose file of stages is bad."""
    return of("--config=x.yaml", *wanted, x_yaml=content)


def bad_stage(wanted: str, **changed: object) -> Case:
    """Return a case of one stage with bad values, in YAML."""
    fields = {"name": "a", "about": "x", "command": "python -V", "limit_s": 1} | changed
    return bad_stages(
        "stages:\n - {" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}\n", "a", wanted
    )


RESULTS = '{"metric": "stage", "arm": "rates", "status": "ok"}\n'
CASES = [
    bare("", "--device=gpu, but this machine has none", "--rehearse"),
    bare("--stage=rates|--resume", "this machine has none", "--rehearse"),
    bare("--norehearse", "this machine has none", "--rehearse"),
    of("--stage=", "--stage=''", "rates"),
    of("--stage=none", "--stage='none'", "rates"),
    of("--stage=Rates", "--stage='Rates'", "rates"),
    of("--stage=rates,none", "--stage='none'", "rates"),
    of("--stage=rates,,proof", "--stage=''"),
    of("--stage=rates;proof", "--stage='rates;proof'"),
    of("--stages=rates", "--stages", "nearest is --stage"),
    of("--budget_s=0", "--budget_s", "0"),
    of("--data=none", "--data=none is no folder"),
    of("--data=README.md", "--data=README.md is no folder"),
    of("--budget_s=-5", "--budget_s", "-5"),
    of("--budget_s=nan", "--budget_s=nan"),
    of("--budget_s=inf", "--budget_s=inf"),
    of("--budget_s=long", "--budget_s", "long"),
    of("--budget_s=", "--budget_s"),
    of("--budget=100", "--budget", "nearest is --budget_s"),
    of("--resum", "--resum", "nearest is --resume"),
    of("--rehearse=maybe", "--rehearse", "maybe"),
    of("--device=cpu", "--device"),
    of("--with_model", "--with_model", "--pack=FOLDER"),
    of("rates", "'rates' is not a flag"),
    of("--resume|rates", "'rates' is not a flag"),
    of("--config=", "--config is missing"),
    of("--config=none.yaml", "none.yaml"),
    of("--config=configs", "configs"),
    of("--config=configs/suites/tiny.yaml", "tiny.yaml"),
    of("--set=stages", "stages"),
    of("--set=stagges=[]", "stagges"),
    of("--set=stages=[]", "stages"),
    of("--set=needs=[no-such-package]", "lacks no-such-package", "run"),
    of("--set=needs=[no.such.module]", "lacks no.such.module"),
    bad_stages("", "x.yaml"),
    bad_stages("stages: [", "x.yaml"),
    bad_stages("needs: [jax]\n", "x.yaml", "stages"),
    bad_stages("stages: rates\n", "x.yaml", "stages"),
    bad_stages("stages: [{name: a}]\n", "x.yaml", "about"),
    bad_stages(
        "stages: [{name: a, about: x, command: ls, limit_s: 1}, {name: a, about: x, command: ls, limit_s: 1}]",
        "a name stands twice among a, a",
    ),
    bad_stage("name", name="'../a'"),
    bad_stage("limit_s", limit_s=0),
    bad_stage("limit_s", limit_s=".inf"),
    bad_stage("limit", limit=3),
    bad_stage("has no words", command="''"),
    bad_stage("No closing quotation", command='"ls \'a"'),
    bad_stage("{work}, {device} and {data} are known", command="'ls {wrok}'"),
    bad_stage("{work}, {device} and {data} are known", command="'ls {0}'"),
    bad_stage("{work}, {device} and {data} are known", command="'ls {work'"),
    bad_stage("{work}, {device} and {data} are known", command="'ls {work.x}'"),
    bad_stage("{work}, {device} and {data} are known", command="'ls {work[x]}'"),
    bad_stage("{work}, {device} and {data} are known", rehearsal="'{size}'"),
    bad_stage("{work}, {device} and {data} are known", environment="{A: '{home}'}"),
    bad_stage("environment", environment="[A]"),
    of("--workdir=", "--workdir=", "empty"),
    of("--workdir=a.txt", "--workdir=a.txt", "is a file", a_txt="mine"),
    of("--workdir=a.txt/b", "--workdir=a.txt/b", "is a file", a_txt="mine"),
    of("--workdir=/proc/none", "--workdir=/proc/none"),
    of("--work=", "--work=", "empty"),
    of("--work=a.txt", "--work=a.txt", "is a file", a_txt="mine"),
    of("--work=a.txt/b", "--work=a.txt/b", "is a file", a_txt="mine"),
    of("--work=/proc/none", "--work=/proc/none"),
    Case("gpu.py --rehearse --workdir=w", ("w/results.jsonl has results", "--resume"), {"w/results.jsonl": RESULTS}),
    Case(
        "gpu.py --rehearse --workdir=w --resume",
        ("w/results.jsonl line 1 is not a record",),
        {"w/results.jsonl": "text\n" + RESULTS},
    ),
    Case("gpu.py --rehearse --workdir=w --resume", ("not UTF-8",), {"w/results.jsonl": b"\xff\xfe\n"}),
    Case("gpu.py --rehearse --workdir=w --resume", ("results.jsonl",), {"w/results.jsonl/a": b""}),
    bare("--pack=", "--pack=", "empty"),
    bare("--pack=configs", "--pack=configs", "is there already"),
    bare("--pack=a.txt", "--pack=a.txt", "is a file", a_txt="mine"),
    bare("--pack=a.txt/p", "--pack=a.txt/p", "is a file", a_txt="mine"),
    bare("--pack=/proc/none", "--pack=/proc/none"),
    bare("--pack=p|--rehearse", "--pack=p only gathers files"),
    bare("--pack=p|--resume", "--pack=p only gathers files"),
    bare("--pack=p|--stage=rates", "--pack=p only gathers files"),
    Case("gpu.py --pack=p --with_model", ("p-model-1 is there already",), {"p-model-1/part": b""}),
    Case("gpu.py --pack=p --with_model", ("p-model-2 is there already",), {"p-model-2/part": b""}),
]
