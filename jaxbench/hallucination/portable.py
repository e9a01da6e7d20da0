"""A detector for other runtimes: one folder with its reader as programs of fixed sizes, or as a model folder (S file).

    bundle.json              what follows, as Bundle, with every file's SHA-256
    detector.safetensors     the detector, bound to this reader
    tokenizer/               onnx, stablehlo: the reader's tokenizer; the programs are a backend's exported.py
    model/                   safetensors: the reader as a Hugging Face folder, which both backends read

Programs take one response to one prompt, padded to sizes that are fixed at export.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pydantic

from jaxbench import config, outputs
from jaxbench.hallucination import programs, saved_detector
from jaxbench.hallucination.group import LoadedReader
from jaxbench.hallucination.layout import PromptArrays, ResponseArrays
from jaxbench.hallucination.reader_settings import ReaderSettings

DETECTOR, ABOUT, MODEL, TOKENIZER = "detector.safetensors", "bundle.json", "model", "tokenizer"
Kind = Literal["onnx", "stablehlo", "safetensors"]
KINDS = get_args(Kind)
WINDOW = 1024  # default window of programs, in tokens


class Sizes(config.Base):
    """Sizes that programs are compiled for."""

    window: int = pydantic.Field(default=WINDOW, ge=16)  # tokens of prompt and response
    lens_slots: int = pydantic.Field(default=8, ge=1)  # tokens of a response with parametric scores

    @property
    def response(self) -> int:
        """Maximum number of tokens of a response."""
        return self.window // 2

    def example(self) -> dict[str, np.ndarray]:
        """Arrays of these sizes, by name in the order of programs.INPUTS."""
        prompt, response = (1, self.window), (1, self.response)
        return {
            "tokens": np.zeros(prompt, np.int32), "positions": np.full(prompt, -1, np.int32),
            "is_context": np.zeros(prompt, bool), "num_attended": np.ones(1, np.int32),
            "response_tokens": np.zeros(response, np.int32), "targets": np.zeros(response, np.int32),
            "response_positions": np.full(response, -1, np.int32), "segments": np.zeros(response, np.int32),
            "is_generated": np.zeros(response, bool), "slots": np.zeros(self.lens_slots, np.int32),
        }  # fmt: skip


class Bundle(config.Base):
    """Contents of an export folder."""

    format: Literal[1] = 1
    kind: Kind
    dtype: Literal["float32", "bfloat16"]  # weights and products
    model_sha256: str  # of the reader that the detector is bound to
    sizes: Sizes | None  # of programs; None = a model folder
    inputs: dict[str, str]  # of programs, in order: type and sizes, such as int32[1,64]
    outputs: dict[str, tuple[str, ...]]  # of each program, in order
    files: dict[str, str]  # path inside the folder -> SHA-256


class ProgramReader:
    """Programs as a FeatureReader: its methods and results, for one response per row."""

    def __init__(self, programs: programs.Programs, sizes: Sizes):
        self._programs, self._sizes = programs, sizes

    def read_prompt(self, prompts: PromptArrays) -> PromptArrays:
        """Return prompts unchanged: a program reads prompt and response together."""
        return prompts

    def scores(
        self, prompt: PromptArrays, prompts: PromptArrays, rows: ResponseArrays, slots: np.ndarray, num_slots: int
    ) -> dict[str, np.ndarray]:
        """Compute every feature of a response, as FeatureReader.scores."""
        chosen = np.zeros(self._sizes.lens_slots, np.int32)
        chosen[:num_slots] = slots[:num_slots]
        found = self._programs.scores(self._arrays(prompts, rows) | {"slots": chosen})
        return found | {"parametric": found["parametric"][:num_slots]}

    def surprise(self, prompt: PromptArrays, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Compute loss and entropy alone, as FeatureReader.surprise."""
        return self._programs.surprise(self._arrays(prompt, rows))

    def _arrays(self, prompts: PromptArrays, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Bring prompts and rows to a program's sizes; only padding is added or cut off."""
        given = {**prompts._asdict(), **rows._asdict(), "response_tokens": rows.tokens, "tokens": prompts.tokens}
        given |= {"response_positions": rows.positions, "positions": prompts.positions}
        made = {name: array for name, array in self._sizes.example().items() if name != "slots"}
        for name, array in made.items():
            width = min(array.shape[-1], given[name].shape[-1])
            array[..., :width] = given[name][..., :width]
        return made


def check(
    folder: str | Path, kind: Kind, *, model: str | None, window: int | None, inputs: tuple[str | None, ...] = (),
    overwrite: bool = False,
) -> Path:  # fmt: skip
    """Check the arguments of `write` without reading a tensor; return the folder's path.

    inputs: files and folders that must not be inside it; overwrite: an export that is there may be replaced.

    Raises:
      ValueError: the folder holds an input, or anything that may not be replaced; the window is longer than what the
        reader was trained on, or given without programs; the model cannot be a reader; or a package is missing.
    """
    from jaxbench.hallucination import reader
    from jaxbench.pretrained import weights

    path = outputs.check_folder(folder, flag="--output")
    place = path.resolve()
    held = [each for each in inputs if each is not None and Path(each).resolve().is_relative_to(place)]
    if held:
        raise ValueError(f"--output={folder} holds the input {held[0]}, which would be lost; name another folder")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"--output={folder} exists; name another folder, or pass --overwrite")
        if not (path / ABOUT).is_file():
            raise ValueError(f"--output={folder} holds no export, and --overwrite replaces nothing else")
    if kind == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ValueError(f"--format=onnx: {error}; pip install -e '.[export]'") from error
    if kind == "safetensors" and window is not None:
        raise ValueError(f"--window={window} is of programs; a folder of --format={kind} reads any window")
    decoder = weights.read_config(model)
    reader.check(decoder)
    if kind != "safetensors" and (window or WINDOW) > decoder.max_seq_len:
        raise ValueError(
            f"--window={window or WINDOW}: {model or 'the default model'} was trained on {decoder.max_seq_len} tokens; "
            "pass --window=TOKENS"
        )
    return path


def write(
    folder: str | Path, saved: saved_detector.Saved, kind: Kind, *, model: str | None, window: int | None = None,
    package: str,
) -> Bundle:  # fmt: skip
    """Write a detector and its reader for another runtime, atomically.

    An export that is there is replaced. window: of programs, tokens of prompt and response; None = WINDOW.
    package: whose exporter writes: PyTorch's for ONNX, JAX's for StableHLO.

    Raises:
      ValueError: as `check`, with overwrite; the model is not the detector's; programs are asked for, and the reader's
        weights are integers or the detector has a tuned reader.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    if saved.settings.bits is not None and kind != "safetensors":
        raise ValueError(
            f"export: --format={kind} has float weights, and the detector's reader bits={saved.settings.bits}; wanted "
            "safetensors"
        )
    if saved.detector.tuned is not None and kind != "safetensors":
        raise ValueError(
            f"export: --format={kind} has the reader's programs alone, and the detector has a tuned reader beside it; "
            "wanted safetensors, or a detector that was fitted without --tuned"
        )
    folder = check(folder, kind, model=model, window=window, overwrite=True)
    checkpoint = weights.load_checkpoint(model)
    saved_detector.check_model(saved, checkpoint.sha256, name=model or "the default model")
    tokenizer, sizes = load_tokenizer(model), None
    with outputs.whole_folder(folder) as made:
        if kind == "safetensors":
            dtype = saved.settings.dtype
            weights.save_checkpoint(made / MODEL, checkpoint.config, checkpoint.params, tokenizer=tokenizer)
            saved = saved._replace(model_sha256=weights.checksum(made / MODEL))
        else:
            sizes = _sizes(saved.settings, window or WINDOW)
            dtype = "float32" if kind == "onnx" else saved.settings.dtype  # ONNX Runtime has few bfloat16 kernels
            (made / TOKENIZER).mkdir()
            tokenizer.save(made / TOKENIZER)
            names = ("transformer", "hallucination.exported")
            transformer, exported = (importlib.import_module(f"{package}.{name}") for name in names)
            decoder = transformer.build(checkpoint.config, checkpoint.params, dtype=dtype)
            layer = saved.settings.layer(checkpoint.config.num_layers)
            exported.write_programs(decoder, made, sizes.example(), state_layer=layer)
        saved_detector.save(made / DETECTOR, saved)
        bundle = Bundle(
            kind=kind, dtype=dtype, model_sha256=saved.model_sha256, sizes=sizes,
            inputs={} if sizes is None else programs.specs(sizes.example()),
            outputs={} if sizes is None else {"scores": programs.SCORES, "surprise": programs.SURPRISE},
            files=_checksums(made),
        )  # fmt: skip
        outputs.write_json(made / ABOUT, bundle.model_dump())
        if folder.is_dir() and any(folder.iterdir()):
            os.rename(folder, made.with_name(f"{folder.name}-before"))  # deleted with the folder that `made` is in
    return bundle


def _sizes(settings: ReaderSettings, window: int) -> Sizes:
    lens = window // 2 if settings.lens_tokens is None else min(settings.lens_tokens, window // 2)
    return Sizes(window=window, lens_slots=lens)


def _checksums(folder: Path) -> dict[str, str]:
    from jaxbench.pretrained import assets

    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / ABOUT)
    return {path.relative_to(folder).as_posix(): assets.sha256_file(path) for path in files}


def load(folder: str | Path) -> Bundle:
    """Read what a folder holds, and check that all files are as they were written.

    Raises:
      ValueError: it is not an export, or a file is missing, new or changed.
    """
    path = Path(folder) / ABOUT
    try:
        bundle = Bundle(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = config.said(error)
        raise ValueError(f"detector: {folder} holds no bundle of `hallucination.py export` ({reason})") from error
    found = _checksums(Path(folder))
    changed = sorted(name for name in {*found, *bundle.files} if found.get(name) != bundle.files.get(name))
    if changed:
        what = "is missing" if changed[0] not in found else "is not what was exported"
        raise ValueError(f"detector: {folder}: {changed[0]} {what}; export the detector again")
    return bundle


def settings(folder: Path, bundle: Bundle, saved: saved_detector.Saved) -> ReaderSettings:
    """Return the settings of a folder's reader.

    Raises:
      ValueError: the detector is bound to another reader.
    """
    saved_detector.check_model(saved, bundle.model_sha256, name=f"the reader in {folder}")
    # programs take one response per row
    changes = {"model": str(folder / MODEL)} if bundle.kind == "safetensors" else {"row_tokens": 1}
    return saved.settings.model_copy(update=changes)


def load_reader(folder: Path, bundle: Bundle) -> LoadedReader:
    """Load the programs of a folder as a reader, as extract.load_reader.

    Raises:
      ValueError: a program is missing or damaged, or ONNX Runtime is not installed.
    """
    from jaxbench.pretrained.tokenizer import load_tokenizer

    load_programs = programs.load_onnx if bundle.kind == "onnx" else programs.load_stablehlo
    made = ProgramReader(load_programs(folder, bundle.sizes.example()), bundle.sizes)
    return LoadedReader(made, load_tokenizer(str(folder / TOKENIZER)), bundle.sizes.window)
