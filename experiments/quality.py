"""Measure what every quantisation method costs in quality, in one table.

    quality.py --config=configs/quantization/books.yaml --model=FOLDER

Quantises the model by every method, runs all results on the same windows of held-out text, and prints KL to the float
model, bits per byte, agreement of the most probable token and recall of a repeated passage, with intervals. A killed
run is resumed by the same command. Bad input ends with exit code 2 and one line.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS


def main() -> int:
    """Measure every method, and print the tables."""
    process_environment.ensure("cpu")
    from jaxbench import config, store
    from jaxbench.pretrained import tokenizer, weights
    from jaxbench.quantization import quantize
    from jaxbench.quantization.study import report, windows
    from jaxbench.quantization.study.quality import Quality
    from jaxbench.text import packing

    settings = cli.load_config(Quality)
    spec = None if VALUES.model == "default" else VALUES.model
    words = tokenizer.load_tokenizer(spec)
    texts = {
        name: windows.of_text(words, path, settings.windows, settings.length) for name, path in settings.texts.items()
    }
    calibration = settings.calibration
    seen = functools.cache(lambda: windows.calibration(words, calibration.data, calibration.rows, calibration.length))
    needs = any(each.recipe is not None and each.recipe.needs_calibration for each in settings.methods.values())
    if needs:
        seen()  # raises for a text that is too short, before the first method runs
    held = weights.load_checkpoint(spec)
    rows = {f"texts.{name}": each.tokens for name, each in texts.items()}
    for name, tokens in (rows | ({"calibration": seen()} if needs else {})).items():
        quantize.check_tokens(held.config, tokens, what=f"{name} ({held.source})")
    workdir = Path(VALUES.workdir)
    about = {"model": held.source, "model_sha256": held.sha256}
    about["text_sha256"] = {name: packing.text_sha256(path) for name, path in settings.texts.items()}
    about["calibration_sha256"] = packing.text_sha256(calibration.data)
    for name, path in settings.texts.items():  # of the default text one half is for each
        if needs and path is not None and about["text_sha256"][name] == about["calibration_sha256"]:
            said = f"texts.{name}={path} is the text of calibration: it flatters the methods that are calibrated"
            print(said, file=sys.stderr)
    same = config.config_id(settings, exclude=("methods", "pairs"))  # methods may change: each is its own part
    store.claim(workdir, f"{same}-{held.sha256[:12]}-{windows.digest(texts)}")
    cli.keep(f"finished methods in {workdir} are kept; the same command goes on")
    found = run(settings, held, texts, seen, workdir)
    console = terminal.console()
    for table in report.write(settings, found, found["float32"], workdir, about):
        console.print(table)
    for name, sha256 in {**about["text_sha256"], "calibration": about["calibration_sha256"]}.items():
        print(f"text sha256 of {name}: {sha256}")
    print(f"written: {workdir}/report.html, report.svg, results.csv, summary.json")
    return cli.EXIT_OK


def run(settings: Any, held: Any, texts: Any, seen: Any, workdir: Path) -> dict[str, Any]:
    """Measure every method and the float model; return figures by name, each stored as a part."""
    from rich import progress

    from jaxbench import config, store, transformer
    from jaxbench.quantization.study import measure, methods, windows

    reference = transformer.build(held.config, held.params)
    console, found = terminal.console(stderr=True), {}
    count = sum(len(each.tokens) for each in texts.values())
    with progress.Progress(console=console, disable=not console.is_terminal) as bar:
        for name, method in {"float32": None, **settings.methods}.items():
            task = bar.add_task(name, total=count)
            moved = functools.partial(bar.update, task)

            def compute(method: Any = method, moved: Any = moved) -> dict[str, Any]:
                made = None if method is None else methods.make(method, held, seen)
                size = sum(value.nbytes for value in held.params.values())
                model = reference if made is None else made.model
                values = measure.figures(model, reference, texts, progress=lambda done: moved(completed=done))
                bits, size = (32.0, size) if made is None else (made.bits_per_weight, made.bytes)
                return {"texts": values, "bits_per_weight": bits, "bytes": size}

            own = "" if method is None else f"-{config.config_id(method)}"
            if own and method.recipe is not None and method.recipe.needs_calibration:
                own = f"-{windows.digest({own: seen()})}"
            found[name], _ = store.kept(workdir / "methods" / f"{name}{own}.json", compute)
            moved(completed=count)
    return found


if __name__ == "__main__":
    cli.define_config("configs/quantization/books.yaml")
    cli.define_model()
    cli.define_workdir("out/quality")
    cli.run(main, about=__doc__)
