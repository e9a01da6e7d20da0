"""The commands keygen, detect and identify, as a user runs them; and their pieces."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from jaxbench import process_environment
from jaxbench.watermark import commands, detection, identify, localize, significance
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import PUBLIC_KEY, Key, write_key_file
from jaxbench.watermark.reference import Evidence
from jaxbench.watermark.texts import Ragged
from tests.structure import ROOT
from tests.test_cli import command, refused, shell_environment


def watermark(*arguments: str, **options):
    return command("watermark.py", *arguments, **options)


@pytest.fixture
def key_file(tmp_path) -> str:
    path = tmp_path / "key"
    write_key_file(path, Key(0xFEDCBA9876543210))
    return str(path)


@pytest.fixture
def corpus(tmp_path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "One small text of some words, and then a few more of them."}\n{"text": "\xff"}\n')
    return str(path)


def test_a_key_is_made_and_used_to_score_a_file(tmp_path, corpus):
    key, out = str(tmp_path / "new_key"), str(tmp_path / "scores.jsonl")
    assert watermark("keygen", f"--output={key}").returncode == 0
    files = (f"--key_file={key}", f"--input={corpus}", f"--output={out}")
    done = watermark("detect", "--backend=numpy", *files, COLUMNS="40")
    assert done.returncode == 0, done.stderr
    assert "1 texts of" in done.stdout and "1 bad lines were left out" in done.stdout
    assert f"  {corpus} line 2: not UTF-8" in done.stdout, "output that is no terminal is not wrapped"
    assert f"written: {out}, {out}.report.json" in done.stdout
    row = json.loads((tmp_path / "scores.jsonl").read_text())
    assert row["num_scored"] > 10 and 0 < row["p_value"] <= 1
    refused(watermark("keygen", f"--output={key}"), "new_key exists", "name another file")


def test_data_is_named_with_the_sha256_that_the_result_carries(tmp_path):
    data, out = tmp_path / "texts.jsonl", tmp_path / "out"
    words = [f"word{i} of{i % 7} the{i % 11} mill{i % 13}" for i in range(600)]
    texts = [" ".join(words[start : start + 60]) for start in range(0, 600, 60)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    small = "num_texts=8 num_tokens=40 num_keys=2 num_list_keys=2 per_text=1".split() + ["schemes={a: {scheme: kgw}}"]
    done = watermark("calibrate", f"--data={data}", f"--workdir={out}", *(f"--set={each}" for each in small))
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    assert f"text: {data}, sha256 {sha256}\n" in done.stdout, done.stderr
    assert json.loads((out / "calibration.json").read_text())["text_sha256"] == sha256


def test_one_text_is_shown_with_its_scores(key_file):
    done = watermark("detect", f"--key_file={key_file}", "--text=Words of a sm\u0430ll text.", "--set=context.width=2")
    assert done.returncode == 0, done.stderr
    assert "1 characters canonicalised" in done.stdout and "p = " in done.stdout and "small text" in done.stdout
    done = watermark("detect", "--backend=torch", f"--key_file={key_file}", "--text=Hi", "--scheme=gumbel")
    assert done.returncode == 0 and "p = 1 " in done.stdout and "too short" in done.stdout, done.stderr


def test_letters_that_the_locale_lacks_are_spelled_out(key_file):
    text = "--text=Words of a na\u00efve \u2014 text."
    done = watermark("detect", "--backend=numpy", f"--key_file={key_file}", text, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "na\\xefve \\u2014 text" in done.stdout, done.stdout + done.stderr


def test_identify_shows_every_candidate(key_file):
    family = ("--schemes=kgw,unigram,kgw_transformers", f"--key_files={key_file}")
    done = watermark("identify", *family, "--backend=numpy", "--text=Words of a text.")
    assert done.returncode == 0, done.stderr
    for name in ("kgw/key", "unigram/key", "kgw_transformers", "p (holm)"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["detct"], ("'detct'", "nearest is detect")),
        (["detect"], ("--text or --input", "none")),
        (["detect", "--text=a", "--input=b"], ("text and input",)),
        (["detect", "--text=a"], ("--key_file is missing", "kgw")),
        (["detect", "--text=a", "--key_file=KEY", "--scheme=kgv"], ("'kgv'", "nearest is kgw")),
        (["detect", "--text=a", "--key_file=KEY", "--set=gamma=1.5"], ("gamma=1.5", "less than 1")),
        (["detect", "--text=a", "--key_file=KEY", "--set=gama=0.5"], ("'gama'", "nearest is gamma")),
        (["detect", "--text=a", "--key_file=KEY", "--vocab_size=1000"], ("49152 tokens", "vocabulary 1000")),
        (["detect", "--text=a", "--key_file=no_key"], ("no_key", "No such file")),
        (["detect", "--text=a", "--key_file=OPEN"], ("may be used by others", "chmod 600")),
        (["detect", "--text=a", "--key_file=WRONG"], ("holds no key", "16 hexadecimal digits")),
        (["detect", "--input=CORPUS", "--key_file=KEY"], ("--input", "--output=FILE.parquet")),
        (["detect", "--input=EMPTY", "--output=o.csv", "--key_file=KEY"], ("empty.txt is empty",)),
        (["detect", "--input=CORPUS", "--output=o.xls", "--key_file=KEY"], ("o.xls", ".parquet")),
        (["identify", "--text=a"], ("--key_files names 0 files", "kgw")),
        (["attack", "--attack=typoo", "--input=CORPUS", "--output=o.jsonl"], ("typoo", "typo")),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_names_it(arguments, words, tmp_path, key_file, corpus):
    (tmp_path / "open").write_text("jaxbench-key 0123456789abcdef\n")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "wrong").write_text("hello\n")
    (tmp_path / "wrong").chmod(0o600)
    (tmp_path / "empty.txt").write_text("")
    places = {"KEY": key_file, "OPEN": tmp_path / "open", "WRONG": tmp_path / "wrong", "CORPUS": corpus}
    places["EMPTY"] = tmp_path / "empty.txt"
    filled = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        filled.append(f"{name}={places[value]}" if equals and value in places else argument)
    backend = ["--backend=numpy"] if arguments[0] in ("detect", "identify") else []
    done = watermark(*filled, *backend, cwd=tmp_path)
    refused(done, *words)
    assert "0123456789abcdef" not in done.stderr


def test_help_lists_the_commands_and_each_commands_flags():
    done = watermark("--help")
    assert done.returncode == 0
    for name in ("keygen", "detect", "identify", "attack", "evaluate", "calibrate", "power", "benchmark"):
        assert f"\n  {name} " in done.stdout
    assert watermark().returncode == 2
    done = watermark("identify", "--help")
    assert "--correction=holm|bonferroni" in done.stdout and "--key_file=" not in done.stdout


# The pieces


def test_a_scheme_is_a_name_or_a_file_with_changes(tmp_path):
    assert commands.read_scheme("kgw", ["context.width=3", "gamma=0.5"]).context.width == 3
    path = tmp_path / "mine.yaml"
    path.write_text("scheme: gumbel\ncontext: {width: 2}\n")
    assert commands.read_scheme(str(path)).context.width == 2
    path.write_text("scheme: {scheme: synthid, depth: 5}\nmodel: tiny\n")
    assert commands.read_scheme(str(path), ["depth=6"]).depth == 6
    path.write_text("marks: [{name: a, scheme: {scheme: dip, alpha: 0.4}}, {name: none}]\n")
    assert commands.read_scheme(str(path)).alpha == 0.4
    path.write_text("marks: [{name: a, scheme: dip}, {name: none}]\n")
    assert commands.read_scheme(str(path), ["alpha=0.3"]).alpha == 0.3
    path.write_text("marks: [{name: a, scheme: {scheme: dip}}, {name: b, scheme: {scheme: kgw}}]\n")
    with pytest.raises(ValueError, match="2 marked schemes, wanted one"):
        commands.read_scheme(str(path))


def test_candidates_are_every_scheme_under_every_key(tmp_path, key_file):
    schemes = [
        commands.read_scheme("kgw"),
        commands.read_scheme("kgw", ["context.width=2"]),
        commands.read_scheme("kgw_markllm"),
    ]
    found = commands.candidates(schemes, [key_file])
    assert [one.name for one in found] == ["kgw1/key", "kgw2/key", "kgw_markllm"]


def test_a_scheme_that_is_named_twice_is_refused(key_file):
    schemes = [commands.read_scheme(name) for name in ("gumbel", "kgw", "kgw")]
    with pytest.raises(ValueError, match="--schemes names scheme kgw twice with the same fields .places 2 and 3."):
        commands.candidates(schemes, [key_file])


def test_the_number_found_is_read_from_every_kind_of_output(tmp_path):
    path, rows = tmp_path / "a.jsonl", [list(range(i, i + 30)) for i in range(40)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    scheme = parse_scheme("kgw_transformers")
    detector = detection.NumpyDetector(scheme, vocab_size=101)
    p_values = detection.detect(detector, Ragged.from_lists(rows), PUBLIC_KEY).p_value
    for kind in ("parquet", "jsonl", "csv"):
        job = bulk_detection.Job(commands.candidates([scheme], []), vocab_size=101)
        out, screen = str(tmp_path / f"o.{kind}"), Console(file=io.StringIO(), width=100)
        commands.detect_file(str(path), out, job, level=0.5, console=screen)
        found = f"{(p_values <= 0.5).sum()} texts at p <= 0.5 (if none were marked, 20 or fewer by chance on average)"
        assert found in screen.file.getvalue()


class Numbers:
    """A tokenizer of numbers."""

    vocab_size = 211

    def encode_batch(self, texts, *, add_special=True):
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids):
        return f"{ids[0]} "


def shown(text: str, scheme, key: Key = Key(5)) -> tuple[significance.Detections, str]:
    """Return what detect_text finds, and the screen with its styles."""
    screen = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard", highlight=False)
    job = bulk_detection.Job((identify.Candidate("one", scheme, key),), canonicalize=False)
    found = commands.detect_text(text, job, tokenizer=Numbers(), console=screen, level=0.01)
    return found, screen.file.getvalue()


def test_the_p_in_bold_is_corrected_for_all_payloads():
    scheme, found = parse_scheme({"scheme": "kgw", "payload_bits": 7}), []
    for number, row in enumerate(np.random.default_rng(3).integers(0, 211, (60, 40))):
        one, screen = shown(" ".join(map(str, row)), scheme, Key(number))
        bold = re.search(r"\x1b\[1mp = (\S+)", screen)
        assert float(bold[1]) == pytest.approx(one.p_value[0], rel=1e-2)
        assert f"payload {one.payload[0]}, the likeliest of 128; every p is corrected for all" in screen
        found.append(one.p_value[0])
    assert (np.array(found) <= 0.05).mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 60)


def test_a_span_of_a_text_with_a_payload_is_corrected_for_all_payloads():
    scheme = parse_scheme({"scheme": "kgw", "payload_bits": 7})
    words = np.zeros((1, 30), np.uint32)
    evidence = Evidence(words, np.ones((1, 30), bool))
    alone = localize.localize(scheme, evidence, vocab_size=211)[0].p_value
    assert localize.localize(scheme, evidence, vocab_size=211, num_payloads=128)[0].p_value == 128 * alone


def test_brackets_of_a_text_and_of_a_name_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(Numbers, "decode", lambda self, ids: "[bold]:smile: [/x] " if ids == [1] else "w ")
    _, screen = shown("1 2 3", parse_scheme("kgw"))
    assert "[bold]:smile: [/x] " in re.sub(r"\x1b\[[0-9;]*m", "", screen)
    console = Console(file=io.StringIO(), width=200)
    job = bulk_detection.Job((identify.Candidate("kgw/[red]key", parse_scheme("kgw"), Key(1)),), canonicalize=False)
    commands.identify_text("1 2 3", job, tokenizer=Numbers(), console=console, level=0.01)
    assert "kgw/[red]key" in console.file.getvalue()


def test_tokens_are_coloured_by_their_evidence():
    class Words:
        def decode(self, ids):
            return f"w{ids[0]} "

    scheme = parse_scheme("kgw")
    words = np.array([[0, 0, 2**31]], np.uint32)
    text = commands.highlighted(
        Words(), np.array([5, 6, 7]), scheme, Evidence(words, np.array([[False, True, True]])), []
    )
    assert text.plain == "w5 w6 w7 " and [str(span.style) for span in text.spans] == ["dim", "green", "red"]


def test_characters_of_several_tokens_are_shown_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(int(one) for one in ids).decode("utf-8", errors="replace")

    given = "a\U0001f600\u4e00b"
    ids = np.array(list(given.encode()))
    evidence = Evidence(np.zeros((1, len(ids)), np.uint32), np.ones((1, len(ids)), bool))
    assert commands.highlighted(Bytes(), ids, parse_scheme("kgw"), evidence, []).plain == given
    control = np.array(list(b"a\x1b[31m\n"))
    evidence = Evidence(np.zeros((1, len(ids)), np.uint32), np.ones((1, len(ids)), bool))
    assert commands.highlighted(Bytes(), control, parse_scheme("kgw"), evidence, []).plain == "a\u241b[31m\n"
    broken = commands.highlighted(Bytes(), ids[:3], parse_scheme("kgw"), evidence, [])
    assert broken.plain.startswith("a\ufffd")


def test_key_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [tmp_path / name / "key" for name in ("a", "b")]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        write_key_file(path, Key(number))
    found = commands.candidates([commands.read_scheme("kgw")], [str(path) for path in paths])
    assert [one.name for one in found] == [f"kgw/{path}" for path in paths]
    with pytest.raises(ValueError, match="names a file twice"):
        commands.candidates([commands.read_scheme("kgw")], [str(paths[0])] * 2)
    copied = tmp_path / "copied.key"
    write_key_file(copied, Key(1))
    with pytest.raises(ValueError, match="kgw/.*b/key and kgw/.*copied.* have one and the same key"):
        commands.candidates([commands.read_scheme("kgw"), commands.read_scheme("dip")], [*map(str, paths), str(copied)])


def test_a_passphrase_is_asked_for_on_a_terminal_only(tmp_path):
    words = [str(ROOT / "experiments" / "watermark.py"), "keygen", "--passphrase", f"--output={tmp_path}/key"]
    done = subprocess.run(
        [sys.executable, *words],
        input="secret\n", capture_output=True, text=True, start_new_session=True, env=shell_environment(), timeout=60,
    )  # fmt: skip
    refused(done, "--passphrase", "terminal", "leave the flag out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["gpu", "tpu"])
@pytest.mark.parametrize("name", ["detect", "identify", "attack", "generate"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(name, device, tmp_path, key_file, corpus):
    with contextlib.suppress(ValueError):
        process_environment.check_attached(device)
        pytest.skip(f"this machine has a {device}")
    words = {
        "detect": (f"--key_file={key_file}", f"--input={corpus}"),
        "identify": (f"--key_files={key_file}", f"--input={corpus}"),
        "attack": ("--attack=typo", f"--input={corpus}"),
        "generate": (f"--set=marks=[{{name: a, key_file: {key_file}, scheme: {{scheme: kgw}}}}]",),
    }
    before = sorted(one.name for one in tmp_path.iterdir())
    done = watermark(name, *words[name], f"--output={tmp_path}/o.jsonl", f"--device={device}")
    refused(done, f"--device={device}", "this machine has none")
    assert sorted(one.name for one in tmp_path.iterdir()) == before
