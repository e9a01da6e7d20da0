"""A detector for other runtimes: one folder with its reader as programs of fixed sizes, or as a model folder (S file).

    bundle.json              what follows, as Bundle
    detector.safetensors     the detector, bound to this reader
    tokenizer/               onnx, stablehlo: the reader's tokenizer; the programs are a backend's exported.py
    model/                   safetensors: the reader as a Hugging Face folder, which both backends read

Programs take one response behind one prompt. They are padded to sizes that are fixed when they are written.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from jaxbench import config, outputs
from jaxbench.hallucination import programs, saved_detector
from jaxbench.hallucination.layout import PromptArrays, ResponseArrays

DETECTOR, ABOUT, MODEL, TOKENIZER = "detector.safetensors", "bundle.json", "model", "tokenizer"
Kind = Literal["onnx", "stablehlo", "safetensors"]


class Sizes(config.Base):
    """What programs are compiled for."""

    window: int = pydantic.Field(default=1024, ge=16)  # tokens of prompt and response
    lens_slots: int = pydantic.Field(default=8, ge=1)  # tokens of a response with parametric scores

    @property
    def response(self) -> int:
        """Tokens of a response, at most."""
        return self.window // 2

    def example(self) -> dict[str, np.ndarray]:
        """Arrays of these sizes, by name, as programs take them."""
        prompt, response = (1, self.window), (1, self.response)
        return {
            "tokens": np.zeros(prompt, np.int32), "positions": np.full(prompt, -1, np.int32),
            "is_context": np.zeros(prompt, bool), "num_attended": np.ones(1, np.int32),
            "response_tokens": np.zeros(response, np.int32), "targets": np.zeros(response, np.int32),
            "response_positions": np.full(response, -1, np.int32), "segments": np.zeros(response, np.int32),
            "is_generated": np.zeros(response, bool), "slots": np.zeros(self.lens_slots, np.int32),
        }  # fmt: skip


class Bundle(config.Base):
    """What a folder holds."""

    format: Literal[1] = 1
    kind: Kind
    sizes: Sizes
    model_sha256: str


class ProgramReader:
    """Programs as a FeatureReader: its methods and results, for one response a row."""

    def __init__(self, programs: programs.Programs, sizes: Sizes):
        self._programs, self._sizes = programs, sizes

    def read_prompt(self, prompts: PromptArrays) -> PromptArrays:
        """Prompts as they are: a program reads prompt and response in one."""
        return prompts

    def scores(
        self, prompt: PromptArrays, prompts: PromptArrays, rows: ResponseArrays, slots: np.ndarray, num_slots: int
    ) -> dict[str, np.ndarray]:
        """Every feature of a response, as FeatureReader.scores."""
        chosen = np.zeros(self._sizes.lens_slots, np.int32)
        chosen[:num_slots] = slots[:num_slots]
        found = self._programs.scores(self._arrays(prompts, rows) | {"slots": chosen})
        return found | {"parametric": found["parametric"][:num_slots]}

    def surprise(self, prompt: PromptArrays, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Loss and entropy alone, as FeatureReader.surprise."""
        return self._programs.surprise(self._arrays(prompt, rows))

    def _arrays(self, prompts: PromptArrays, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Both in a program's sizes: what is added or left out is padding."""
        given = {**prompts._asdict(), **rows._asdict(), "response_tokens": rows.tokens, "tokens": prompts.tokens}
        given |= {"response_positions": rows.positions, "positions": prompts.positions}
        made = {name: array for name, array in self._sizes.example().items() if name != "slots"}
        for name, array in made.items():
            width = min(array.shape[-1], given[name].shape[-1])
            array[..., :width] = given[name][..., :width]
        return made


def write(
    folder: str | Path, saved: saved_detector.Saved, kind: Kind, *, model: str | None, window: int, package: str
) -> Bundle:
    """Write a detector and its reader for another runtime; all of it appears at once or nothing.

    package: whose exporter writes: ONNX by PyTorch's, StableHLO by JAX's.

    Raises:
      ValueError: the model is not the detector's, the window is longer than the model's, the folder has content, or
        programs are asked for of a reader that holds integers.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    if saved.settings.bits is not None and kind != "safetensors":
        raise ValueError(f"export: {kind} has float weights, and the detector's reader bits={saved.settings.bits}; "
                         "wanted safetensors")  # fmt: skip
    checkpoint = weights.load_checkpoint(model)
    saved_detector.check_model(saved, checkpoint.sha256, name=model or "the default model")
    if window > checkpoint.config.max_seq_len:
        raise ValueError(f"--window={window}: the model was trained on {checkpoint.config.max_seq_len} tokens")
    lens = saved.settings.lens_tokens
    sizes = Sizes(window=window, lens_slots=window // 2 if lens is None else min(lens, window // 2))
    tokenizer = load_tokenizer(model)
    with outputs.whole_folder(folder) as made:
        if kind == "safetensors":
            weights.save_checkpoint(made / MODEL, checkpoint.config, checkpoint.params, tokenizer=tokenizer)
            saved = saved._replace(model_sha256=weights.checksum(str(made / MODEL)))
        else:
            (made / TOKENIZER).mkdir()
            tokenizer.save(made / TOKENIZER)
            names = ("transformer", "hallucination.exported")
            transformer, exported = (importlib.import_module(f"{package}.{name}") for name in names)
            dtype = "float32" if kind == "onnx" else saved.settings.dtype
            decoder = transformer.build(checkpoint.config, checkpoint.params, dtype=dtype)
            layer = saved.settings.layer(checkpoint.config.num_layers)
            exported.write_programs(decoder, made, sizes.example(), state_layer=layer)
        saved_detector.save(made / DETECTOR, saved)
        bundle = Bundle(kind=kind, sizes=sizes, model_sha256=saved.model_sha256)
        outputs.write_json(made / ABOUT, bundle.model_dump())
    return bundle


def load(folder: str | Path) -> Bundle:
    """What a folder holds.

    Raises:
      ValueError: it is no such folder.
    """
    path = Path(folder) / ABOUT
    try:
        return Bundle(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"detector: {folder} holds no bundle of `hallucination.py export` ({reason})") from error


def load_reader(folder: str | Path, bundle: Bundle) -> tuple[Any, Any, int]:
    """The programs of a folder as a FeatureReader, the tokenizer and the window, as extract.load_reader.

    Raises:
      ValueError: a program is missing or damaged.
    """
    from jaxbench.pretrained.tokenizer import load_tokenizer

    load_programs = programs.load_onnx if bundle.kind == "onnx" else programs.load_stablehlo
    made = ProgramReader(load_programs(Path(folder)), bundle.sizes)
    return made, load_tokenizer(str(Path(folder) / TOKENIZER)), bundle.sizes.window
