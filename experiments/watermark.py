"""Watermark text, detect the watermark, attack it, and measure all of it.

    watermark.py keygen   --output=secret.key                                      a new secret key
    watermark.py generate --config=configs/watermark/kgw.yaml --output=marked.jsonl
    watermark.py detect   --scheme=kgw --key_file=secret.key --text="..."          one text, its tokens coloured
    watermark.py detect   --scheme=kgw --key_file=secret.key --input=corpus.jsonl.gz --output=scores.parquet
    watermark.py identify --schemes=kgw,gumbel --key_files=key1,key2 --text="..."  which scheme and key, if any
    watermark.py attack   --attack=typo --strength=0.1 --input=texts.jsonl --output=attacked.jsonl
    watermark.py evaluate --config=configs/watermark/evaluate.yaml                 detectability, quality, robustness
    watermark.py calibrate --config=configs/watermark/calibrate.yaml               realised false-positive rates

Commands that decode (generate, evaluate, power, train-detector, benchmark, attack) take --kernels: auto uses native
kernels on a CPU, or the framework's own operations (xla) where these are not available; it then says why.
Texts that generate wrote are scored as token ids, without their prompts, by --field=ids --prompt_field=prompt_tokens.
A killed run is resumed by the same command, except keygen and attack. Bad input ends with exit code 2 and one line;
calibrate and power end with 1 when a gate fails.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.generation import kernel_flags
from jaxbench.watermark import checks

VALUES = flags.FLAGS
say = functools.partial(print, flush=True)
TWINS = {  # modules of each backend that generates; Flax's are the default
    "flax": (),
    "equinox": (
        "jaxbench.eqx.transformer", "jaxbench.sample", "jaxbench.watermark.logits_processor",
        "jaxbench.eqx.native.model",
    ),
    "torch": (
        "torch_ref.transformer", "torch_ref.sample", "torch_ref.watermark.logits_processor",
        "torch_ref.native.model",
    ),
}  # fmt: skip
DETECTORS = {
    "flax": ("jaxbench.watermark.detect", "Detector"),
    "torch": ("torch_ref.watermark.detect", "Detector"),
    "numpy": ("jaxbench.watermark.detection", "NumpyDetector"),
}


# Keys


def define_keygen() -> None:
    """Define the flags of keygen."""
    flags.DEFINE_string("output", None, "file for the key; an existing one is never written over")
    flags.DEFINE_bool("passphrase", False, "ask for a passphrase and derive the key from it")


def keygen() -> int:
    """Write a key file."""
    from jaxbench.watermark import keys

    cli.require_flag("output", "a file for the key")
    if os.path.lexists(VALUES.output):
        raise ValueError(f"--output={VALUES.output} exists; a key that is written over is lost, name another file")
    outputs.check_file(VALUES.output)
    keys.write_key_file(VALUES.output, keys.ask_passphrase() if VALUES.passphrase else keys.Key.random())
    print(f"written: {VALUES.output} (keep it secret: whoever has it can find and forge the mark)")
    return cli.EXIT_OK


# Generation


def define_generate() -> None:
    """Define the flags of generate."""
    cli.define_config("configs/watermark/kgw.yaml")
    flags.DEFINE_string("output", None, "file for the texts: a .jsonl file, one object a line")
    flags.DEFINE_bool("overwrite", False, "start anew where --output holds rows of an earlier run")
    kernel_flags.define()
    cli.define_backend()
    cli.define_device()


def write_texts() -> int:
    """Write marked continuations of prompts."""
    cli.require_flag("output", "a .jsonl file for the texts")
    checks.check_device()
    if VALUES.backend == "torch" and VALUES.device != "cpu":
        raise ValueError(f"--device={VALUES.device}: generate with --backend=torch runs on the CPU")
    process_environment.ensure(VALUES.device, library=cli.array_library())
    from jaxbench.generation import batch
    from jaxbench.watermark import generate

    settings = cli.load_config(generate.GenerateConfig)
    outputs.check_file(VALUES.output, [VALUES.config], overwrite=True)
    backend = generate.Backend(*map(importlib.import_module, TWINS[VALUES.backend]))
    cli.keep(batch.kept(VALUES.output, overwrite=VALUES.overwrite))
    written = generate.run(
        settings, VALUES.output, backend=backend, overwrite=VALUES.overwrite, device=VALUES.device,
        options=kernel_flags.options(), say=say,
    )  # fmt: skip
    say(f"written: {written}")
    return cli.EXIT_OK


# Detection


def define_texts() -> None:
    """Define what detect and identify share."""
    flags.DEFINE_string("text", None, "one text to test; shown on the terminal")
    flags.DEFINE_string("input", None, "file or glob: .jsonl or .txt (one text a line), plain or .gz")
    flags.DEFINE_string("output", None, "scores of --input: a .parquet, .jsonl or .csv file")
    flags.DEFINE_string("field", "text", "key of the text, or of a list of token ids, in a line of .jsonl")
    flags.DEFINE_string("prompt_field", None, "key of the number of tokens that are prompt and not scored")
    flags.DEFINE_integer("vocab_size", None, "logits of the model that wrote the texts (unset: those of --model)")
    flags.DEFINE_bool("canonicalize", True, "undo look-alikes and invisible characters before tokenising")
    flags.DEFINE_float("level", 0.01, "p-value that counts as found", lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_integer("processes", 1, "processes of one thread each, or Ray actors", lower_bound=1)
    flags.DEFINE_enum("engine", "local", ["local", "ray"], "where they run: this machine, or a Ray cluster")
    flags.DEFINE_string("score_cache", None, "where scores are kept and looked up: redis://HOST:PORT/NUMBER, or local")
    flags.DEFINE_bool("overwrite", False, "replace an output, or what another run left of one; never an input")
    flags.DEFINE_multi_string("set", [], "change one field of the scheme: --set gamma=0.5 --set context.width=4")
    cli.define_model()
    cli.define_backend(choices=tuple(DETECTORS))
    cli.define_device()


def define_detect() -> None:
    """Define the flags of detect."""
    flags.DEFINE_string("scheme", "kgw", "name of a scheme, or a YAML file with its fields")
    flags.DEFINE_string("key_file", None, "file of the secret key (watermark.py keygen)")
    flags.DEFINE_integer("prompt_tokens", 0, "first tokens of --text that are not scored", lower_bound=0)
    flags.DEFINE_string("neural", None, "folder of train-detector: its p-values, beside the exact ones")
    define_texts()


def define_identify() -> None:
    """Define the flags of identify."""
    flags.DEFINE_list("schemes", ["kgw", "gumbel", "unigram", "synthid"], "names of schemes, or YAML files")
    flags.DEFINE_list("key_files", [], "files of secret keys; every scheme is tried under every key")
    flags.DEFINE_string("watermarks", None, "instead: YAML file of named schemes and key files, as a server has them")
    flags.DEFINE_enum("correction", "holm", ["holm", "bonferroni"], "how the family's error rate is held")
    define_texts()


def make_job(candidates: tuple[Any, ...], **options: Any) -> Any:
    """Return the job that the flags describe."""
    from jaxbench.watermark import score_cache
    from jaxbench.watermark.bulk import bulk_detection

    module, name = DETECTORS[VALUES.backend]
    detector = getattr(importlib.import_module(module), name)
    if VALUES.backend != "numpy":
        detector = functools.partial(detector, device=VALUES.device)
    model = None if VALUES.model == "default" else VALUES.model
    return bulk_detection.Job(
        candidates,
        detector,
        model=model,
        vocab_size=checks.vocab_size(model, candidates),
        canonicalize=VALUES.canonicalize,
        field=VALUES.field,
        prompt_field=VALUES.prompt_field,
        cache=score_cache.named(VALUES.score_cache),
        **options,
    )


def score(job: Any, show: Callable[..., Any], **options: Any) -> int:
    """Score --input into --output, or test --text with a function of commands.py."""
    from jaxbench.pretrained.tokenizer import load_tokenizer
    from jaxbench.watermark import commands

    common = {"level": VALUES.level, "console": terminal.console()}
    if VALUES.input is None:
        show(VALUES.text, job, tokenizer=load_tokenizer(job.model), **common, **options)
        return cli.EXIT_OK
    engine = importlib.import_module("jaxbench.watermark.bulk.ray_engine").engine if VALUES.engine == "ray" else None
    cli.keep(f"finished parts are in {VALUES.output}.parts; the same command goes on")
    common |= {"processes": VALUES.processes, "overwrite": VALUES.overwrite, "engine": engine}
    commands.detect_file(VALUES.input, VALUES.output, job, **common)
    return cli.EXIT_OK


def detect() -> int:
    """Detect the watermark of one scheme and key."""
    from jaxbench.watermark import commands, identify, keys

    checks.check_where(VALUES.scheme, VALUES.key_file)
    scheme = commands.read_scheme(VALUES.scheme, VALUES.set)
    missing = f"--key_file is missing: scheme {scheme.scheme} needs the key that the texts were marked with"
    key = keys.key_of(scheme, VALUES.key_file, missing=missing)
    if VALUES.neural is not None:
        process_environment.ensure(VALUES.device)
    job = make_job((identify.Candidate(scheme.scheme, scheme, key),), neural=VALUES.neural)
    return score(job, commands.detect_text, prompt_tokens=VALUES.prompt_tokens)


def identify_family() -> int:
    """Find which of several schemes and keys marked a text."""
    from jaxbench.watermark import commands, serving

    if VALUES.watermarks is None:
        checks.check_where(*VALUES.schemes, *VALUES.key_files)
        schemes = [commands.read_scheme(name, VALUES.set) for name in VALUES.schemes]
        candidates = commands.candidates(schemes, VALUES.key_files)
    else:
        checks.check_where(VALUES.watermarks)
        for name in ("schemes", "key_files", "set"):
            if VALUES[name].present:
                raise ValueError(f"--{name} would do nothing with --watermarks={VALUES.watermarks}; leave one out")
        candidates = serving.read_watermarks(VALUES.watermarks)
    job = make_job(candidates, correction=VALUES.correction)
    return score(job, commands.identify_text)


# Commands with a configuration


def configured(default: str, workdir: str, *, data: bool = True, decodes: bool = True) -> Callable[[], None]:
    """Return a function that defines --config, --set, --workdir, and --data and the kernels' flags where asked for."""

    def define() -> None:
        if decodes:
            kernel_flags.define()
        cli.define_config(f"configs/watermark/{default}.yaml")
        cli.define_workdir(f"out/{workdir}")
        if data:
            cli.define_data()

    return define


def measure_power() -> int:
    """Measure detection rates by length."""
    checks.check_workdir("power.json", "neural.json")
    process_environment.ensure("cpu")
    from jaxbench.watermark.study import power

    settings = cli.load_config(power.Power)
    cli.keep(f"finished parts in {VALUES.workdir} are kept; the same command goes on")
    checks.say_text()
    how = {"options": kernel_flags.options(), "say": say}
    result = power.run(settings, path=VALUES.data, workdir=VALUES.workdir, **how)
    say(f"written: {VALUES.workdir}")
    return cli.EXIT_OK if result["passed"] else cli.EXIT_GATE


def train_neural() -> int:
    """Train the neural detector."""
    checks.check_workdir("power.json", "neural.json")
    process_environment.ensure("cpu")
    from jaxbench.watermark.detector import train_detector

    settings = cli.load_config(train_detector.Training)
    cli.keep(f"finished parts in {VALUES.workdir} are kept; the same command goes on")
    checks.say_text()
    how = {"options": kernel_flags.options(), "say": say}
    train_detector.run(settings, path=VALUES.data, workdir=VALUES.workdir, **how)
    say(f"written: {VALUES.workdir}")
    return cli.EXIT_OK


def measure_rates() -> int:
    """Measure realised false-positive rates."""
    from jaxbench.pretrained.tokenizer import load_tokenizer
    from jaxbench.watermark.study import calibrate

    checks.check_workdir("calibration.json")
    settings = cli.load_config(calibrate.Calibration)
    cli.keep(f"finished schemes in {VALUES.workdir} are kept; the same command goes on")
    checks.say_text()
    result = calibrate.run(settings, load_tokenizer(), path=VALUES.data, workdir=VALUES.workdir, say=say)
    say(f"{result['num_outside']} rows outside their band, {result['expected_outside']} expected by chance")
    say(f"written: {VALUES.workdir}/calibration.json, {VALUES.workdir}/calibration.html")
    return cli.EXIT_OK if result["passed"] else cli.EXIT_GATE


def define_evaluate() -> None:
    """Define the flags of evaluate."""
    configured("evaluate", "evaluate", data=False)()
    flags.DEFINE_string("data", None, "folder of prompts and human documents (unset: the packaged English prose)")
    flags.DEFINE_bool("resume", True, "go on with the finished stages in --workdir")


def evaluate_schemes() -> int:
    """Run the evaluation."""
    checks.check_workdir("material.json")
    process_environment.ensure("cpu")
    from jaxbench.watermark.study import evaluate
    from jaxbench.watermark.study.evaluate_config import Evaluate

    settings = cli.load_config(Evaluate)
    cli.keep(f"finished stages in {VALUES.workdir} are kept; the same command goes on")
    checks.say_text(folders=True)
    how = {"options": kernel_flags.options(), "say": say, "console": terminal.console()}
    evaluate.run(settings, VALUES.workdir, resume=VALUES.resume, data=VALUES.data, **how)
    return cli.EXIT_OK


def measure_peers() -> int:
    """Measure rates against peers."""
    checks.check_workdir()
    from jaxbench.watermark.study import benchmark

    settings = cli.load_config(benchmark.Benchmark)
    if settings.generation is None and settings.throughput is None and settings.verdicts is None:
        kernel_flags.check_idle("without generation, throughput and verdicts nothing is decoded")
    cli.keep(f"finished measurements in {VALUES.workdir} are kept; the same command goes on")
    benchmark.run(settings, VALUES.workdir, options=kernel_flags.options(), say=say)
    say(f"written: {VALUES.workdir}")
    return cli.EXIT_OK


# Attacks


def define_attack() -> None:
    """Define the flags of attack."""
    names = "delete, synonym, typo, homoglyph, truncate, copy_paste, paraphrase, .."
    flags.DEFINE_multi_string("attack", None, f"name or name:strength ({names}); several run one after the other")
    about = "share of the text that is attacked (unset: 0.1, rewriting by a model: 1)"
    flags.DEFINE_float("strength", None, about, lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_multi_string("set", [], "one more field of the attacks: --set unit=token, --set spans=3")
    flags.DEFINE_string("human", None, "human texts to paste into or to take words from (unset: the packaged prose)")
    flags.DEFINE_string("input", None, "texts: .jsonl or .txt (one a line), plain or .gz")
    flags.DEFINE_string("output", None, "the attacked texts: a .jsonl file")
    flags.DEFINE_bool("overwrite", False, "replace the output; never an input")
    flags.DEFINE_string("field", "text", "key of the text in a line of .jsonl, and of the attacked one")
    flags.DEFINE_integer("seed", 0, "of the attack's random stream", lower_bound=0, upper_bound=2**64 - 1)
    kernel_flags.define()
    cli.define_model()
    cli.define_device()


def attack() -> int:
    """Attack the texts of a file."""
    from jaxbench.watermark import commands
    from jaxbench.watermark.attack import attacks

    cli.require_flag("attack", "one, as in --attack=typo:0.1")
    cli.require_flag("input", "a file of texts")
    cli.require_flag("output", "a .jsonl file for the attacked texts")
    chosen = commands.read_attacks(VALUES.attack, strength=VALUES.strength, changes=VALUES.set)
    commands.check_attack_files(VALUES.input, VALUES.output, overwrite=VALUES.overwrite, inputs=[VALUES.human])
    if attacks.rewrites(chosen) or VALUES.device != "cpu":
        checks.check_device()
    if not attacks.rewrites(chosen):
        kernel_flags.check_idle(f"--attack={','.join(VALUES.attack)} asks no model to write")
    tools = commands.attack_tools(
        chosen, human=VALUES.human, model=None if VALUES.model == "default" else VALUES.model,
        options=kernel_flags.options(), device=VALUES.device, say=say,
    )  # fmt: skip
    total, edits = commands.attack_file(
        VALUES.input, VALUES.output, chosen, seed=VALUES.seed, field=VALUES.field, tools=tools,
        overwrite=VALUES.overwrite, say=say,
    )  # fmt: skip
    say(f"{total:,} texts attacked, {edits:.1%} of the words changed on average; written: {VALUES.output}")
    return cli.EXIT_OK


COMMANDS = {
    "keygen": cli.Command(define_keygen, keygen, "Make a secret key."),
    "generate": cli.Command(define_generate, write_texts, "Write marked continuations of prompts."),
    "detect": cli.Command(define_detect, detect, "Find the mark of one scheme and key, in one text or in files."),
    "identify": cli.Command(define_identify, identify_family, "Find which of several schemes and keys marked a text."),
    "attack": cli.Command(define_attack, attack, "Attack the texts of a file."),
    "evaluate": cli.Command(define_evaluate, evaluate_schemes, "Generate, attack, detect, judge quality: one report."),
    "calibrate": cli.Command(
        configured("calibrate", "calibrate", decodes=False),
        measure_rates,
        "Measure realised false-positive rates on human text.",
    ),
    "power": cli.Command(configured("power", "power"), measure_power, "Measure detection rates by length."),
    "train-detector": cli.Command(configured("neural", "neural"), train_neural, "Train the neural detector."),
    "benchmark": cli.Command(
        configured("benchmark", "watermark-benchmark", data=False), measure_peers, "Measure rates against peers."
    ),
}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
