"""Bad input through the real commands: one line that says what and how to mend it, exit code 2, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxbench import cli
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import assets
from tests.bad_input import harness
from tests.structure import ROOT

TINY = "configs/suites/tiny.yaml"
# The quickest suite that really runs: one PyTorch arm, no train step, no roofline.
QUICK = ("--set=arms=[torch_eager]", "--set=train.enabled=false", "--set=roofline.enabled=false")

# Starts a command that may not write files beyond a size, as on a full disk; a process of its own, because JAX here
# warns when it is forked.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def shell_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a user's shell, off the network, without conftest.py's JAX variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""} | changes


def command(script: str, *arguments: str, cwd=ROOT, limit_bytes: int | None = None, **environment: str):
    """Run an experiment as a user does and return what it did."""

    limited = [sys.executable, "-c", LIMITED, str(limit_bytes)] if limit_bytes is not None else []
    return subprocess.run(
        [*limited, sys.executable, str(ROOT / "experiments" / script), *arguments],
        cwd=cwd,
        env=shell_environment(**environment),
        capture_output=True,
        text=True,
        timeout=240,
    )


def compare(*arguments: str, **options):
    """Run the comparison on the tiny suite."""
    return command("compare.py", f"--config={TINY}", *arguments, **options)


def refused(done, *words: str) -> str:
    """Assert exit code 2 and one line on stderr that carries all words; return it."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--devce=cpu", ("--devce", "--device")),
        ("--device=phone", ("phone", "cpu", "gpu", "tpu")),
        ("extra", ("'extra'", "--name=value")),
        ("--set=decode.new_tokns=4", ("decode.new_tokns", "nearest is decode.new_tokens")),
        ("--set=new_tokens=4", ("'new_tokens'", "nearest is decode.new_tokens")),
        ("--set=decode.new_tokens=many", ("decode.new_tokens", "'many'", "valid integer")),
        ("--set=seed=true", ("seed", "true", "number")),
        ("--set=decode.new_tokens=-4", ("decode.new_tokens", "-4", "greater than")),
        ("--set=decode.batches=[-1]", ("decode.batches", "-1", "greater than 0")),
        ("--set=decode.prompt_tokens=[0]", ("decode.prompt_tokens", "0", "greater than 0")),
        ("--set=arms=[flacks]", ("arms", "'flacks'", "'flax'")),
        ("--set=decode", ("'decode'", "a.b=value")),
        ("--config=configs/suites/tinny.yaml", ("tinny.yaml", "tiny.yaml")),
        ("--set=decode.prompt_tokens=[1000]", ("1008 positions", "128", "lower prompt_tokens")),
        ("--set=prefill.batches=[100000000]", ("GiB", "available", "lower the batch")),
        ("--tpu_topology=v5e:3x7", ("v5e:3x7", "v5e:2x2")),
        ("--data=README.md", ("--data=README.md", "'tiny' has none")),
        ("--model=no/such/model.gguf", ("no/such/model.gguf",)),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_mends_it(argument, words, tmp_path):
    refused(compare(argument, f"--workdir={tmp_path / 'out'}"), *words)
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_device_that_is_not_there_is_refused(tmp_path):
    if any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")):
        pytest.skip("this machine has a GPU")
    refused(compare("--device=gpu", f"--workdir={tmp_path}"), "--device=gpu", "this machine")


def test_unknown_keys_and_broken_yaml_name_file_and_place(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: tiny\nrounds: {lanches: 3}\n")
    done = command("compare.py", f"--config={path}", f"--workdir={tmp_path / 'out'}")
    refused(done, str(path), "rounds.lanches", "rounds.launches")
    path.write_text("model: tiny\nrounds: {launches: 3\n")
    done = command("compare.py", f"--config={path}", f"--workdir={tmp_path / 'out'}")
    refused(done, str(path), "line 3", "not YAML")


def test_a_corrupt_and_a_cut_model_file_are_named(tmp_path):
    corrupt, cut = tmp_path / "corrupt.gguf", tmp_path / "cut.gguf"
    corrupt.write_bytes(b"not a model at all" * 100)
    with open(assets.fetch_default_model(), "rb") as file:
        cut.write_bytes(file.read(3_000_000))
    for path, word in ((corrupt, "not a GGUF file"), (cut, "truncated")):
        refused(compare(f"--model={path}", f"--workdir={tmp_path / 'out'}"), path.name, word)


def test_an_empty_text_and_an_unknown_kind_of_text_are_named(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "text.docx"
    empty.write_text("")
    binary.write_bytes(b"PK")
    for path in (empty, binary, tmp_path / "absent.txt"):
        refused(compare("--model=default", f"--data={path}", f"--workdir={tmp_path / 'out'}"), path.name)


def test_no_network_and_an_empty_cache_say_how_to_fill_it(tmp_path):
    cache = tmp_path / "cache"
    done = compare("--model=default", f"--workdir={tmp_path / 'out'}", JAXBENCH_CACHE=str(cache))
    refused(done, str(cache), "python -m jaxbench.pretrained.assets", "--model=PATH")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_full_disk_loses_nothing_and_resume_goes_on(tmp_path):
    workdir = f"--workdir={tmp_path}"
    assert compare(*QUICK, workdir, "--set=rounds.launches=1").returncode == 0
    results = tmp_path / "results.jsonl"
    before = results.read_bytes()
    again = (*QUICK, workdir, "--set=rounds.launches=2", "--resume")
    full = compare(*again, limit_bytes=len(before) + 100)
    assert full.returncode == 2
    assert full.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in full.stderr
    assert all(word in full.stderr.splitlines()[-1] for word in ("cannot write", "results.jsonl", "--resume"))
    assert results.read_bytes() == before
    assert compare(*again).returncode == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert results.read_bytes().startswith(before)
    assert {row["launch"] for row in rows if row["metric"] == "decode_tokens_per_s"} == {1, 2}


def test_a_relative_workdir_is_below_the_folder_of_the_call(tmp_path):
    name = tmp_path.name  # no folder of the repository, where the workers run
    flags = (f"--config={ROOT / TINY}", *QUICK, f"--workdir={name}", "--set=rounds.launches=1")
    done = command("compare.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / name / "results.jsonl").read_text().splitlines()]
    assert "decode_tokens_per_s" in {row["metric"] for row in rows}
    assert not (ROOT / name).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_an_interrupt_says_what_is_kept(tmp_path, number):
    results = tmp_path / "results.jsonl"
    process = subprocess.Popen(
        [sys.executable, "experiments/compare.py", f"--config={TINY}", *QUICK, f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=shell_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not results.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted; finished results are in" in errors and "--resume" in errors and "Traceback" not in errors
    assert all(json.loads(line) for line in results.read_text().splitlines())


def test_parity_refuses_bad_input_in_one_line(tmp_path):
    workdir = f"--workdir={tmp_path}"
    refused(command("parity.py", "--case=transformer/smollm", workdir), "transformer/smollm", "transformer/smollm2")
    refused(command("parity.py", workdir), "--case=", "--all")
    refused(command("parity.py", "--al", workdir), "--al", "--all")


def test_help_lists_the_projects_own_flags_only():
    done = compare("--help")
    assert done.returncode == 0 and done.stderr == ""
    for flag in ("--config=", "--set=", "--model=", "--device=cpu|gpu|tpu", "--[no]resume", "--workdir="):
        assert flag in done.stdout
    assert "absl" not in done.stdout and "pdb" not in done.stdout


def test_a_gpu_that_pytorch_does_not_have_is_refused_before_anything_is_written(tmp_path):
    if any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")):
        pytest.skip("this machine has a GPU")
    for backend in ("torch", "flax"):
        done = command("train.py", f"--backend={backend}", "--device=gpu", f"--workdir={tmp_path / 'out'}")
        refused(done, "--device=gpu", "this machine has none")
    assert list(tmp_path.iterdir()) == []


def test_a_place_to_write_is_checked_before_the_proof_starts(tmp_path):
    done = command("parallel.py", "--case=zero0", f"--output={tmp_path / 'none' / 'x.jsonl'}")
    refused(done, "--output", str(tmp_path / "none"))


# The pieces


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "out/x"), ("out/x", "No space left", "JAXBENCH_CACHE")),
        (PermissionError(13, "Permission denied", "/folder/x"), ("/folder/x", "Permission denied", "JAXBENCH_CACHE")),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), ("No such file", "a.txt")),
        (MemoryError(), ("out of memory", "lower the batch")),
        (ValueError(""), ("ValueError",)),
    ],
)
def test_every_kind_of_error_says_something_useful(error, words):
    assert [word for word in words if word not in cli.explain(error)] == []


def test_a_configuration_made_by_a_command_is_refused_in_the_projects_own_words():
    def problem(**values):
        with pytest.raises(ValueError) as found:
            TransformerConfig(**values)
        return cli.explain(found.value)

    sizes = {"vocab_size": 8, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 3, "head_dim": 2}
    both = [problem(**sizes, num_kv_heads=2, max_seq_len=8), problem(**sizes, num_kv_heads=3, max_seq_len=0)]
    assert all("pydantic" not in each and "validation error" not in each for each in both)
    assert both[0].startswith("model: num_heads=3") and both[1].startswith("max_seq_len=0: Input should be greater")


@pytest.mark.parametrize("name", ["workdir", "output"])
def test_only_a_flag_that_the_command_has_is_advised(name, monkeypatch):
    errors = OSError(28, "No space left on device", "x"), PermissionError(13, "Permission denied", "x")
    monkeypatch.setattr(cli, "_kept", [])  # what a test before said of its outputs
    monkeypatch.setattr(cli, "FLAGS", {})
    assert all("--" not in cli.explain(error) for error in errors)
    monkeypatch.setattr(cli, "FLAGS", {name})
    assert all(f"with --{name} (JAXBENCH_CACHE for downloads)" in cli.explain(error) for error in errors)


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        (None, 0, ""),
        (1, 1, ""),
        (cli.GateFailed("P2 is 0.3, wanted 1e-9"), 1, "failed: P2 is 0.3, wanted 1e-9\n"),
        (ValueError("two\n lines: 3"), 2, "error: two lines: 3\n"),
        (KeyboardInterrupt(), 130, "interrupted; "),
    ],
)
def test_exit_codes_follow_the_outcome(outcome, code, line, capsys, monkeypatch):
    def main():
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.delenv("JAXBENCH_DEBUG", raising=False)
    with harness.one_main(), pytest.raises(SystemExit) as end:
        cli.run(main, argv=["main.py"])
    assert end.value.code == code
    printed = capsys.readouterr().err
    assert line in printed and (line or not printed)


def test_an_error_of_the_program_itself_keeps_its_traceback():
    def main():
        raise KeyError("a bug")

    with harness.one_main(), pytest.raises(KeyError, match="a bug"):
        cli.run(main, argv=["main.py"])


def test_an_interrupt_inside_an_import_ends_with_the_exit_code_of_one(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "from jaxbench import cli\n\n\ndef main():\n    exec('raise KeyboardInterrupt')\n\n\ncli.run(main)\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True
    )
    assert done.returncode == cli.EXIT_INTERRUPT and done.stderr.startswith(b"interrupted; ")


CLOSED = """
import os, subprocess, sys
from pathlib import Path
from jaxbench import cli
from jaxbench.config import TransformerConfig
def main():
    print("printed"), print("said", file=sys.stderr)
    Path("written.txt").write_text("whole")
    with open("held.txt", "w") as file:
        subprocess.run(["echo", "of a started process"]), os.write(1, b"of a library"), file.write("held")
cli.run(main)
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_command_started_without_standard_streams_does_its_work(tmp_path, closed):
    (tmp_path / "main.py").write_text(CLOSED)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" main.py {closed}', sys.executable], cwd=tmp_path, capture_output=True, text=True,
        env=shell_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert ((tmp_path / "written.txt").read_text(), (tmp_path / "held.txt").read_text()) == ("whole", "held")
    assert ("printed\n" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_what_is_kept_is_said_only_where_something_is(monkeypatch):
    full = OSError(28, "No space left on device", "out/x")
    monkeypatch.setattr(cli, "_kept", [])
    answers = iter([False, True])
    cli.keep("checkpoints are in out", when=lambda: next(answers))
    assert "kept" not in cli.explain(full) and "; kept: checkpoints are in out;" in cli.explain(full)
    cli.keep("always")
    assert "; kept: always;" in cli.explain(full)


WRITER = """
import sys
from absl import flags
from jaxbench import cli, terminal
def main():
    how = flags.FLAGS.how
    if how == "other":
        raise BrokenPipeError(32, "Broken pipe")
    print("first", flush=True)
    sys.stdin.read()
    if how == "rich":
        terminal.console().print("more")
    elif how != "late":
        print("more", flush=True)
    else:
        print("more")
flags.DEFINE_string("how", "now", "")
cli.run(main, argv=sys.argv)
"""


@pytest.mark.parametrize("how", ["now", "late", "rich"])
def test_output_that_nothing_reads_any_more_ends_the_command_without_a_word(how):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, f"--how={how}"], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", cli.EXIT_PIPE)


def test_a_broken_pipe_of_another_kind_is_an_error_like_any_other():
    command = [sys.executable, "-c", WRITER, "--how=other"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: Broken pipe\n")


def test_the_default_config_is_the_repositorys_and_a_named_one_the_working_folders(tmp_path, monkeypatch):
    def value(*words):
        with harness.one_main():
            cli.define_config("configs/lm/tiny.yaml")
            cli.parse(["main.py", *words])
            cli.resolve_default_config()
            return cli.FLAGS.config

    monkeypatch.chdir(ROOT)
    assert value() == "configs/lm/tiny.yaml"
    monkeypatch.chdir(tmp_path)
    assert value() == str(ROOT / "configs/lm/tiny.yaml")
    assert value("--config=configs/lm/tiny.yaml") == "configs/lm/tiny.yaml"
    (tmp_path / "configs" / "lm").mkdir(parents=True)
    (tmp_path / "configs" / "lm" / "tiny.yaml").write_text("another file\n")
    assert value() == str(ROOT / "configs/lm/tiny.yaml")
    refused(command("memory.py", "cost", "--set=lengths=[]", cwd=tmp_path), "lengths", "empty")
    refused(command("benchmarks.py", "run", "--suite=none", cwd=tmp_path), "none.yaml", "quick, standard, tiny")
