"""The commands detect and identify, on files (bulk/bulk_detection.py) or a single text, and attack (S file)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxbench import config, outputs, yaml_files
from jaxbench.generation import decoder
from jaxbench.pretrained import weights
from jaxbench.text import lines
from jaxbench.watermark import detection, identify, localize, significance
from jaxbench.watermark.attack import attacks
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.config import num_payloads, parse_scheme
from jaxbench.watermark.keys import PUBLIC_KEY, read_key_file
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.texts import Ragged, TextEncoder

SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}  # control characters, made inert
TOKEN_KEYS = ("ids", "continuation_ids", "prompt_tokens")  # in generate's rows: no longer true of an attacked text
ATTACK_KEYS = ("id", "original", "word_edits")  # of an attacked text
LONGEST_CHARACTER = 4  # tokens: each is at least one byte of UTF-8


def read_scheme(given: str, changes: Sequence[str] = ()) -> Any:
    """Read a scheme from its name or a YAML file (its fields, or a generation config with one scheme), with changes.

    Raises:
      ValueError: an unknown scheme or field, a value out of range, or a file that cannot be read.
    """
    content: dict[str, Any] = {"scheme": given}
    if given.endswith((".yaml", ".yml")):
        content = yaml_files.read(Path(given))
        marks = _marked(content.get("marks", []), given)
        if len(marks) > 1:
            raise ValueError(f"scheme: {given} has {len(marks)} marked schemes, wanted one; name the scheme instead")
        content = marks[0] if marks else content
        content = content["scheme"] if isinstance(content.get("scheme"), dict) else content
    for change in changes:
        config.override(content, change)
    return parse_scheme(content)


def _marked(marks: Any, path: str) -> list[dict[str, Any]]:
    """Return the schemes of the marks of a generation configuration."""
    is_list = isinstance(marks, list) and all(isinstance(mark, dict) for mark in marks)
    schemes = [mark.get("scheme") for mark in marks] if is_list else []
    schemes = [{"scheme": scheme} if isinstance(scheme, str) else scheme for scheme in schemes]
    if not is_list or not all(scheme is None or isinstance(scheme, dict) for scheme in schemes):
        raise ValueError(f"scheme: {path} has marks: {str(marks)[:60]}, wanted a list of mappings with a scheme each")
    return [scheme for scheme in schemes if scheme]


def candidates(schemes: Sequence[Any], key_files: Sequence[str]) -> tuple[identify.Candidate, ...]:
    """Combine every scheme with every key, named scheme/key file; schemes of the same kind are numbered.

    A key file's name is its path without folder and suffix; if two names coincide, all are the paths as given.

    Raises:
      ValueError: no scheme, a scheme given twice, no key, a key file or key given twice, or a key file that cannot be
        read or that no scheme would read.
    """
    if not schemes:
        raise ValueError(f"--schemes is empty and --key_files names {len(key_files)}; wanted at least one of each")
    kinds = [scheme.scheme for scheme in schemes]
    twice = next((i for i, scheme in enumerate(schemes) if scheme in schemes[:i]), None)
    if twice is not None:  # every p-value would be corrected for the same test twice
        first = schemes.index(schemes[twice])
        raise ValueError(
            f"--schemes names scheme {kinds[twice]} twice with the same fields (places {first + 1} and {twice + 1}); "
            "leave one out"
        )
    if key_files and all(scheme.key_field is not None for scheme in schemes):
        raise ValueError(
            f"--key_files={','.join(key_files)} would do nothing with {', '.join(kinds)}, whose keys are fields of "
            "their own; leave it out"
        )
    labels = [kind if kinds.count(kind) == 1 else f"{kind}{kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]
    named = []
    stems = [Path(path).stem for path in key_files]
    names = stems if len(set(stems)) == len(stems) else list(key_files)  # files with the same name in several folders
    for label, scheme in zip(labels, schemes):
        if scheme.key_field is not None:
            named.append(identify.Candidate(label, scheme, PUBLIC_KEY))
            continue
        named += [
            identify.Candidate(f"{label}/{name}", scheme, read_key_file(path)) for name, path in zip(names, key_files)
        ]
    if not named:
        raise ValueError(f"--key_files names {len(key_files)} files, and {', '.join(kinds)} need a key; name one")
    if len(set(key_files)) < len(key_files):
        raise ValueError(f"--key_files={','.join(key_files)} names a file twice")
    tried = [(one.scheme, one.key.halves) for one in named]
    twice = next((i for i, one in enumerate(tried) if one in tried[:i]), None)
    if twice is not None:
        first = named[tried.index(tried[twice])].name
        raise ValueError(f"--key_files: {first} and {named[twice].name} have one and the same key; leave one file out")
    return tuple(named)


def detect_file(
    pattern: str, output: str, job: bulk_detection.Job, *, level: float, console: Any, **how: Any
) -> dict[str, Any]:
    """Score the texts of files into one output, with a progress bar, and print what was found."""
    from rich import progress

    bar = progress.Progress(
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[texts]:,} texts"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("", total=None, texts=0)

        def say(report: dict[str, Any], total_bytes: int) -> None:
            texts = bar.tasks[0].fields["texts"] + report["texts"]
            bar.update(task, total=total_bytes, advance=report["bytes"], texts=texts)

        summary = bulk_detection.run(pattern, output, job, say=say, **how)
    rate = summary["texts"] / max(summary["seconds"], 1e-9)
    line = f"{summary['texts']:,} texts of {summary['tokens']:,} tokens in {summary['seconds']:.1f} s"
    console.print(f"{line} ({rate:,.0f} texts/s)")
    chance = f"if none were marked, {level * summary['texts']:,.3g} or fewer by chance on average"
    console.print(f"{_found(output, level):,} texts at p <= {level:g} ({chance})", soft_wrap=True)
    if summary["changed"]:
        console.print(f"{summary['changed']:,} texts were canonicalised (--nocanonicalize keeps them)")
    if job.prompt_field is not None and not summary["prompted"]:
        console.print(
            f"no line has a number above 0 under --prompt_field={job.prompt_field}, so that every token was scored",
            style="yellow", markup=False, emoji=False, soft_wrap=True,
        )  # fmt: skip
    if summary["bad"]:
        console.print(f"{summary['bad']:,} bad lines were left out:", style="yellow")
        for path, number, problem in summary["first_bad"][:5]:
            console.print(f"  {path} line {number}: {problem}", style="yellow", markup=False, emoji=False)
    console.print(f"written: {output}, {output}.report.json", markup=False, emoji=False, soft_wrap=True)
    return summary


def _found(output: str, level: float) -> int:
    import csv

    if output.endswith(".parquet"):
        import pyarrow.parquet as pq

        batches = pq.ParquetFile(output).iter_batches(columns=["p_value"])
        return sum(int((batch.column(0).to_numpy() <= level).sum()) for batch in batches)
    with open(output, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file) if output.endswith(".csv") else map(json.loads, file)
        return sum(float(row["p_value"]) <= level for row in rows)


def detect_text(
    text: str,
    job: bulk_detection.Job,
    *,
    tokenizer: Any,
    console: Any,
    level: float,
    prompt_tokens: int = 0,
) -> significance.Detections:
    """Test one text for the job's only candidate; print p-values (also the trained detector's), tokens and spans."""
    (candidate,) = job.candidates
    scheme, key, vocab_size = candidate.scheme, candidate.key, job.vocab_size or tokenizer.vocab_size
    encoded = TextEncoder(tokenizer, vocab_size=vocab_size, canonicalize=job.canonicalize).encode([text])
    judge = None
    if job.neural is not None:
        from jaxbench.watermark.detector import neural_detection

        judge = neural_detection.NeuralTest(job.neural, vocab_size=vocab_size)
        judge.check(scheme)  # before the text is tried with every payload
    detector = job.make_detector(scheme, vocab_size=vocab_size)
    found = detection.detect(detector, encoded.ids, key, prompt_lengths=prompt_tokens)
    ids, payload, number = encoded.ids.text(0), max(0, int(found.payload[0])), num_payloads(scheme)
    evidence = detector.evidence(ids[None], np.array([len(ids)]), key, prompt_lengths=prompt_tokens, payload=payload)
    if number > 1 and found.payload[0] >= 0:
        console.print(f"payload {payload}, the likeliest of {number:,}; every p is corrected for all, z is its own")
    _print_scores(found, len(ids), int(encoded.num_changed[0]), console)
    if judge is not None:
        verdicts = judge.detect(detector, encoded.ids, key, prompt_lengths=prompt_tokens)
        p_value, num_null, num_tokens = (column[0] for column in verdicts)
        line = f"neural p = {p_value:.3g}   (first {num_tokens} tokens, {num_null} null scores"
        console.print(f"{line}; the exact p above decides)")
    spans = localize.localize(scheme, evidence, vocab_size=vocab_size, level=level, num_payloads=number)[0].spans
    console.print(highlighted(tokenizer, ids, scheme, evidence, spans))
    for span in spans:
        where = f"tokens {span.start}..{span.end - 1}"
        console.print(f"marked: {where}, p = {span.p_value:.3g} over all windows")
    return found


def _print_scores(detections: significance.Detections, num_tokens: int, num_changed: int, console: Any) -> None:
    changed = f", {num_changed} characters canonicalised" if num_changed else ""
    green = f", {detections.num_green[0]} green" if detections.num_green[0] >= 0 else ""
    console.print(f"{num_tokens} tokens, {detections.num_scored[0]} scored{green}{changed}")
    line = f"p = {detections.p_value[0]:.3g}   mid-p = {detections.mid_p[0]:.3g}   z = {detections.score[0]:.2f}"
    console.print(line + (f"   ({detections.reason[0]})" if detections.reason[0] else ""), style="bold")


def highlighted(tokenizer: Any, ids: np.ndarray, scheme: Scheme, evidence: Any, spans: Sequence[Any]) -> Any:
    """Colour the tokens of a text: green is evidence for the mark, red against it, dim is not scored; spans underlined.

    A character of several tokens has the colour of the last one.
    """
    from rich.text import Text

    statistic = scheme.statistic(max(2, int(ids.max(initial=1)) + 1))
    mean, _ = statistic.moments()
    scores, line, begun = statistic.token_scores(evidence)[0], Text(), 0
    for i in range(len(ids)):
        piece = tokenizer.decode(ids[begun : i + 1])
        if piece.endswith("\ufffd") and i + 1 < min(len(ids), begun + LONGEST_CHARACTER):
            continue
        begun = i + 1
        inside = any(span.start <= i < span.end for span in spans)
        colour = "dim" if not evidence.scored[0, i] else "green" if scores[i] > mean else "red"
        line.append(piece.translate(SHOWN), style=colour + (" underline" if inside else ""))
    return line


def identify_text(
    text: str, job: bulk_detection.Job, *, tokenizer: Any, console: Any, level: float
) -> identify.Identification:
    """Test one text against every candidate and print the table, the most likely first."""
    from rich.table import Table
    from rich.text import Text

    vocab_size = job.vocab_size or tokenizer.vocab_size
    ids: Ragged = TextEncoder(tokenizer, vocab_size=vocab_size, canonicalize=job.canonicalize).encode([text]).ids

    identification = identify.identify(
        job.candidates, ids, vocab_size=vocab_size, make_detector=job.make_detector, correction=job.correction
    )
    carries = bool((identification.payloads >= 0).any())
    table = Table("candidate", *(["payload"] if carries else []), "p", f"p ({job.correction})", "")
    for i in np.argsort(identification.p_values[0], kind="stable"):
        verdict = "found" if identification.corrected[0, i] <= level else ""
        payload = [str(identification.payloads[0, i]) if identification.payloads[0, i] >= 0 else ""] if carries else []
        p_values = f"{identification.p_values[0, i]:.3g}", f"{identification.corrected[0, i]:.3g}"
        table.add_row(Text(identification.names[i]), *payload, *p_values, verdict)
    console.print(table)
    return identification


def read_attacks(given: Sequence[str], *, strength: float | None = None, changes: Sequence[str] = ()) -> Any:
    """Read an attack from names or name:strength pairs, several as a chain; `changes` set further fields of all.

    strength: of attacks named without one; None = 0.1, or 1 for rewriting by a model.

    Raises:
      ValueError: a chain is named, a strength is given twice, or as attacks.parse_attack.
    """
    parsed, rewrites = [], get_args(attacks.Rewrite.model_fields["attack"].annotation)
    for name in given:
        named, _, own = name.partition(":")
        if named == attacks.Chain.model_fields["attack"].default:
            raise ValueError(
                f"--attack={name}: several --attack are a chain, as in --attack=typo:0.1 --attack=case:0.3"
            )
        default = 1.0 if named in rewrites else 0.1
        content: dict[str, Any] = {"attack": named, "strength": own or (default if strength is None else strength)}
        for change in changes:
            if config.override(content, change) == ("strength",) and (own or strength is not None):
                raise ValueError(f"--set {change!r}: the strength of {named} is given as {own or strength} too")
        parsed.append(attacks.parse_attack(content))
    return parsed[0] if len(parsed) == 1 else attacks.compose(parsed)


def attack_tools(
    attack: Any,
    *,
    human: str | None,
    model: str | None,
    options: decoder.Options = decoder.Options("xla"),
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> attacks.Tools:
    """Load the tools that an attack needs: tokenizer, human texts, rewriter.

    Raises:
      ValueError: a file or the model cannot be read, the kernels are not available, or a file or model is named that
        the attack does not need.
    """
    from jaxbench.pretrained.tokenizer import load_tokenizer
    from jaxbench.text import passages

    steps = attack.steps if isinstance(attack, attacks.Chain) else (attack,)
    is_token = any(getattr(step, "unit", "word") == "token" for step in steps)
    is_human = any(step.attack in ("copy_paste", "insert", "substitute") for step in steps)
    is_asked = is_token or attacks.rewrites(attack)
    for flag, given, is_needed in (("human", human, is_human), ("model", model, is_asked)):
        if given is not None and not is_needed:
            names = ", ".join(step.attack for step in steps)
            raise ValueError(f"--{flag}={given} would do nothing with the attack {names}; leave it out")
    rewriter = None
    if attacks.rewrites(attack):
        from jaxbench.watermark.attack.rewrite import Rewriter

        choice = decoder.choose(options, device, config=functools.partial(weights.read_config, model))
        if choice.note:
            say(choice.note)
        rewriter = Rewriter(model, choice=choice)
    return attacks.Tools(
        tokenizer=load_tokenizer(model) if is_token else None,
        human=passages.read_texts(human) if is_human else (),
        rewrite=rewriter,
    )


def check_attack_files(
    pattern: str, output: str, *, overwrite: bool = False, inputs: Sequence[str | None] = ()
) -> list[str]:
    """Return the files that a pattern names, after checking the output; `inputs` are further files that are read.

    Raises:
      ValueError: there is no such input, or the output exists, is an input, or is not a .jsonl file.
    """
    if not output.endswith(".jsonl"):
        raise ValueError(f"output: {output} has an unknown suffix, wanted .jsonl")
    paths = lines.find(pattern)
    outputs.check_file(output, [*paths, *inputs], overwrite=overwrite)
    return paths


def attack_file(
    pattern: str,
    output: str,
    attack: Any,
    *,
    seed: int,
    field: str = "text",
    tools: attacks.Tools | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[int, float]:
    """Attack the texts of files, write one object per line; return their number and the mean share of edited words.

    A line has the other keys of its input, except those about the original tokens (TOKEN_KEYS), the attacked text under
    `field`, and: id, original, word_edits. As in detection, unusable lines are skipped and reported.

    Raises:
      ValueError: there is no text, `field` is one of the keys that are written, or as check_attack_files.
    """
    if field in ATTACK_KEYS:
        raise ValueError(f"--field={field}: attack writes {', '.join(ATTACK_KEYS)} itself; give the text another key")
    paths = check_attack_files(pattern, output, overwrite=overwrite)
    total, edits, left_out = 0, 0.0, []
    # a lone surrogate under another key is written as a JSON escape
    how = {"encoding": "utf-8", "errors": "backslashreplace"}
    with outputs.whole(Path(output)) as temporary, open(temporary, "w", **how) as file:
        for chunk in (chunk for path in paths for chunk in lines.chunks(path)):
            records, bad = lines.read(chunk, field=field)
            bad += [lines.Bad(one.line, "token ids, wanted a text") for one in records if isinstance(one.content, list)]
            left_out += [(chunk.path, *one) for one in sorted(bad)]
            records = [record for record in records if isinstance(record.content, str)]
            texts = [record.content for record in records]
            rows = range(total, total + len(texts))
            found = attacks.apply(attack, texts, seed=seed, indices=rows, tools=tools, counts_characters=False)
            kept = _other_keys(chunk, [record.line for record in records], without={field, *TOKEN_KEYS})
            for record, others, text, share in zip(records, kept, found.texts, found.word_edits):
                own = {field: text, "original": record.content, "word_edits": float(share)}
                file.write(json.dumps({"id": None} | others | own, ensure_ascii=False) + "\n")
            total, edits = total + len(texts), edits + float(found.word_edits.sum())
        if not total:
            problem = "; {} line {}: {}".format(*left_out[0]) if left_out else ""
            raise ValueError(
                f"attack: {pattern} holds no text in its {len(paths)} files ({len(left_out)} bad{problem})"
            )
    if left_out:
        say(f"{len(left_out):,} bad lines were left out:")
        for path, number, problem in left_out[:5]:
            say(f"  {path} line {number}: {problem}")
    return total, edits / max(1, total)


def _other_keys(chunk: lines.Chunk, numbers: Sequence[int], *, without: Collection[str]) -> list[dict[str, Any]]:
    """Return the objects of some lines of a chunk, `without` certain keys; empty ones if the lines are plain text."""
    if not chunk.path.endswith(lines.JSON_LINES):
        return [{} for _ in numbers]
    data = chunk.data
    if data is None:
        with open(chunk.path, "rb") as stream:
            stream.seek(chunk.offset)
            data = stream.read(chunk.size)
    all_lines = data.split(b"\n")
    objects = (json.loads(all_lines[number - chunk.first_line].decode("utf-8-sig")) for number in numbers)
    return [{name: value for name, value in each.items() if name not in without} for each in objects]
