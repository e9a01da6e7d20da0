"""Hugging Face transformers as an oracle in float64: random models, their logits, and every module's output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from transformers import modeling_gguf_pytorch_utils


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Make transformers compute norms, softmax and rotary angles in float64; it casts them to float32 explicitly."""
    with contextlib.ExitStack() as stack:
        for name in ("float", "float32"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    logging = transformers.utils.logging
    level, is_bar_on = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if is_bar_on:
            logging.enable_progress_bar()


def random_model(config: Any, *, seed: int = 0) -> torch.nn.Module:
    """Make transformers' random model in float64, with no parameter that is all ones or all zeros."""
    with torch.random.fork_rng(devices=[]), wide():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        with torch.no_grad():  # norms and biases start at one and zero; a swapped or omitted one must show
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def name_of(model: torch.nn.Module) -> str:
    """Name of the oracle: the library's version and the model's class."""
    return f"transformers {transformers.__version__}: {type(model).__name__}"


def why_unread(path: Path) -> str:
    """Return why transformers cannot read the model of a folder or GGUF file; empty if it can."""
    try:
        with quiet():
            if path.is_file():
                config = transformers.AutoConfig.for_model(
                    **modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)["config"]
                )
            else:
                config = transformers.AutoConfig.from_pretrained(path)
                if reason := _why_inexact(config):
                    return reason
            transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # it raises many unrelated types: OSError, KeyError, NotImplementedError, its own
        return (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
        )
    return ""


def _why_inexact(config: Any) -> str:
    """Why a quantised folder's numbers are not bit-identical to transformers'; empty if it is not quantised."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
    return (
        f"quantization_config.quant_method={method}: it multiplies quantised numbers in packages of their own, or "
        "rounds them to the type of their scales as it unpacks them, and not in float64"
    )


def save(model: torch.nn.Module, folder: Any) -> None:
    """Write a model as a folder, as its users do."""
    with quiet():
        model.save_pretrained(folder)


def load(path: Path) -> torch.nn.Module:
    """Load the model of a folder or GGUF file in float64, with every tensor found and used.

    Raises:
      ValueError: transformers finds tensors missing, unused or misshapen.
    """
    if path.is_file():
        return _of_gguf(path)
    try:
        return _of_folder(path)
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:  # from PyTorch's loading, and its own
        reason = " ".join(str(error).split())[:300] or "no reason given"
        raise ValueError(f"transformers: {path} cannot be loaded: {type(error).__name__}: {reason}") from error


def _of_folder(path: Path) -> torch.nn.Module:
    """Model of a Hugging Face folder, with every tensor in its place."""
    with quiet():  # not wide: types of the file are also looked up by name
        read, report = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, output_loading_info=True
        )
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        raise ValueError(f"transformers: {path} does not fit the model: {problems}")
    with quiet(), wide():  # whose rotary frequencies are in float64
        model = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.float64)
    model.load_state_dict(read.state_dict(), assign=True)
    return model.eval()


def _of_gguf(path: Path) -> torch.nn.Module:
    """Model of a GGUF file, without the accelerate package that transformers' from_pretrained requires."""
    read = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    with quiet():
        config = transformers.AutoConfig.for_model(**read(path)["config"])
    without_bar = mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **options: items)
    with quiet(), wide(), without_bar:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        tensors = read(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unexpected:
        raise ValueError(f"transformers: {path} does not fit the model: missing {missing}, unused {unexpected}")
    return model.eval()


def logits(
    model: torch.nn.Module, tokens: Int[np.ndarray, "B T"], positions: Int[np.ndarray, "B T"] | None = None
) -> Float[np.ndarray, "B T V"]:
    """Logits in float64; positions may restart within a row, as in transformers' packed documents."""
    packed = {} if positions is None else {"position_ids": torch.from_numpy(positions).long()}
    with wide(), torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False, **packed).logits.numpy()


def module_outputs(model: torch.nn.Module, tokens: Int[np.ndarray, "B T"]) -> dict[str, np.ndarray]:
    """First tensor that every module returns, by its path, in order of completion; for the model, its logits."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, torch.Tensor):
                found[name] = first.numpy(force=True).copy()

        return hook

    with contextlib.ExitStack() as handles:
        for path, module in model.named_modules():
            if path:
                handles.callback(module.register_forward_hook(keep(path)).remove)
        found["model output"] = logits(model, tokens)
    return found
