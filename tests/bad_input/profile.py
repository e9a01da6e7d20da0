"""Bad input of profile.py: commands, folders, functions, servers, processes; and of --profile on other commands."""

from __future__ import annotations

from tests.bad_input.harness import Case, case_of


def of(command: str, words: str, *wanted: str, **files: str) -> Case:
    """Return a case of one of profile.py's commands."""
    return case_of(("profile.py", command), words, *wanted, **files)


BOUNDLESS = '{"name": "a", "calls": 1, "seconds": 1.0, "share": 1.0, "flops": null, "bytes": null, "roofline": null}'
ROW = BOUNDLESS.replace("}", ', "bound": null}')
OURS = {"a/operations.json": '{"rows": [' + ROW + "]}", "a/compile.json": "[]"}
WITH_MEMORY = OURS | {"a/memory.json": '{"peak_resident_bytes": 1}'}
SCRIPT, SERVER = "--command=a.py", "--url=http://127.0.0.1:9/x"
CASES = [
    Case("profile.py cpuu", ("'cpuu' is no command", "nearest is cpu")),
    of("cpu", "", "--command= is empty"),
    of("cpu", "--command=", "--command= is empty"),
    of("cpu", "quick", "'quick' is not a flag"),
    of("cpu", "--comand=a.py", "--comand", "nearest is --command"),
    of("cpu", "--command=none.py", "none.py is no file"),
    of("cpu", "--command=ls -l", "'ls -l' is no Python script"),
    of("cpu", "--command=python", "'python' is no Python script"),
    of("cpu", "--command=a.py 'x", "cannot be split into words", a_py=""),
    of("cpu", "--command=-m", "-m wants the name of a module"),
    of("cpu", "--command=-m a/b", "-m wants the name of a module"),
    of("cpu", f"{SCRIPT}|--rate=0", "--rate", "0", a_py=""),
    of("cpu", f"{SCRIPT}|--rate=5000", "--rate", "5000", a_py=""),
    of("cpu", f"{SCRIPT}|--tool=perf", "--tool", "perf", a_py=""),
    of("cpu", f"{SCRIPT}|--top=0", "--top", "0", a_py=""),
    of("cpu", f"{SCRIPT}|--output=a.py", "--output=a.py cannot be a folder", a_py=""),
    of("cpu", f"{SCRIPT}|--output=configs", "--output=configs holds something already", a_py=""),
    of("memory", "", "--command= is empty"),
    of("memory", "--command=none.py", "none.py is no file"),
    of("memory", f"{SCRIPT}|--tool=valgrind", "--tool", "valgrind", a_py=""),
    of("memory", f"{SCRIPT}|--output=a.py/b", "--output=a.py/b cannot be a folder", a_py=""),
    of("memory", f"{SCRIPT}|--rate=10", "--rate is no flag of this command", a_py=""),
    of("leaks", "", "--call=None and --url=None: give one of them"),
    of("leaks", f"--call=a.py:f|{SERVER}", "give one of them"),
    of("leaks", "--call=a.py", "--call=a.py is neither FILE.py:FUNCTION"),
    of("leaks", "--call=a.py:", "--call=a.py:"),
    of("leaks", "--call=none.py:f", "none.py is no file"),
    of("leaks", "--call=a-b:f", "a-b is neither a file .py nor the name of a module"),
    of("leaks", "--call=no_such_module:f", "no_such_module", "ModuleNotFoundError"),
    of("leaks", "--call=a.py:g", "a.py has no function g", a_py="def f(): pass\n"),
    of("leaks", "--call=a.py:f", "wants arguments (x)", a_py="def f(x, y=1): pass\n"),
    of("leaks", "--call=a.py:f", "SyntaxError while importing it", a_py="def f(\n"),
    of("leaks", "--call=a.py:f", "ZeroDivisionError while importing it", a_py="1 / 0\n"),
    of("leaks", "--call=a.py:f", "SystemExit while importing it", a_py="raise SystemExit(0)\n"),
    of("leaks", "--call=a.py:f", "is a coroutine or generator", a_py="async def f(): pass\n"),
    of("leaks", "--call=a.py:f|--repeats=3", "--repeats", "3"),
    of("leaks", "--call=a.py:f|--warmup=-1", "--warmup", "-1"),
    of("leaks", "--call=a.py:f|--body=1", "--body=1 needs --url"),
    of("leaks", "--call=a.py:f|--pid=1", "--pid=1 needs --url"),
    of("leaks", SERVER, "needs --pid"),
    of("leaks", f"{SERVER}|--pid=0", "--pid", "0"),
    of("leaks", f"{SERVER}|--pid=999999999", "--pid=999999999: no process"),
    of("leaks", "--url=ftp://a|--pid=1", "--url=ftp://a is no address"),
    of("leaks", f"{SERVER}|--pid=1|--body={{", "--body='{' is no JSON"),
    of("leaks", f"{SERVER}|--pid=1|--body=@none.json", "none.json is no file"),
    of("leaks", f"{SERVER}|--pid=1", "--url=http://127.0.0.1:9/x does not answer"),
    of("leaks", "--call=a.py:f|--device=tpu", "--device=tpu"),
    of("gpu", SCRIPT, "--device=gpu, but this machine has none", "--profile=FOLDER to the command", a_py=""),
    of("operations", "", "--trace= is empty"),
    of("operations", "--trace=none", "--trace=none is no folder"),
    of("operations", "--trace=configs", "--trace=configs holds no profile of JAX"),
    Case("profile.py operations --trace=a", ("operations.json is no JSON",), {"a/operations.json": "{"}),
    Case("profile.py operations --trace=a", ("is not what --profile",), {"a/operations.json": '{"rows": [{}]}'}),
    Case("profile.py operations --trace=a", ("is not what --profile",), {"a/operations.json": "[]"}),
    Case("profile.py operations --trace=a", ("x.xplane.pb", "no profile of JAX"), {"a/x.xplane.pb": b"nothing"}),
    Case("profile.py operations --trace=a", ("x.xplane.pb is empty, wanted a profile",), {"a/x.xplane.pb": b""}),
    Case(
        "profile.py operations --trace=a", ("not what --profile",), {"a/operations.json": f'{{"rows": [{BOUNDLESS}]}}'}
    ),
    of("compare", "", "--base= is empty"),
    of("compare", "--base=a", "--head= is empty"),
    of("compare", "--base=none|--head=none", "--base=none", "operations.json is no file"),
    Case("profile.py compare --base=a --head=b", ("--head=b", "operations.json is no file"), WITH_MEMORY),
    Case("profile.py compare --base=a --head=a", ("memory.json is no file",), OURS),
    Case("profile.py compare --base=a --head=a --top=0", ("--top", "0"), WITH_MEMORY),
    Case("profile.py compare --base=a --head=a", ("compile.json is not",), WITH_MEMORY | {"a/compile.json": "[1]"}),
    of("monitor", "", "--pid= is empty"),
    of("monitor", "--pid=0", "--pid", "0"),
    of("monitor", "--pid=999999999", "--pid=999999999: no process"),
    of("monitor", "--pid=1|--rows=none.jsonl", "--rows=none.jsonl is neither a file nor a folder"),
    of("monitor", "--pid=1|--interval_s=0", "--interval_s", "0"),
    of("monitor", "--pid=1|--for_s=-1", "--for_s", "-1"),
    case_of(("generate.py",), "--prompt=a|--profile=", "--profile= cannot be a folder"),
    case_of(("generate.py",), "--prompt=a|--profile=a.txt", "--profile=a.txt cannot be a folder", a_txt=""),
    case_of(("generate.py",), "--prompt=a|--profile=configs", "--profile=configs holds something already"),
    case_of(("generate.py",), "--prompt=a|--monitor=5", "--monitor"),
    case_of(("generate.py",), "--profile=p", "--prompt is missing"),
    case_of(("train.py",), "--profile=p|--profile_steps=1:2", "--profile=p and --profile_steps=1:2: give one of them"),
]
