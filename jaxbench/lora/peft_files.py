"""Read and write adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors (S file).

Module names are those of transformers; A and B are stored as (rank, in) and (out, rank).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxbench import initial, outputs
from jaxbench.config import TransformerConfig
from jaxbench.lora.config import LoraConfig, LoraTransformerConfig, plain, with_lora
from jaxbench.pretrained import assets, families, hf_config

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Initialisations that leave the decoder's own weights unchanged; PiSSA, OLoRA, CorDA, LoftQ and others change them when
# PEFT opens the folder, so that A and B with the decoder's own weights would be another function.
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
# Settings that, if set, add or change something in the forward pass.
NOT_READ = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "layer_replication", "alora_invocation_tokens",
    "target_parameters", "trainable_token_indices", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip


def save(
    folder: str | Path, config: LoraTransformerConfig, params: Mapping[str, np.ndarray], *, base: str | None = None
) -> Path:
    """Write the adapters of a decoder as a folder that PEFT reads; all of it appears at once or nothing.

    base: name or folder of the decoder without them, as PEFT keeps it; "default" is written as its id on the hub.

    Raises:
      ValueError: the folder has content, or transformers fuses an adapted projection with others.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"save: {folder} exists and is not an empty folder; choose another name or remove it")
    theirs = _modules(config)
    tensors = {}
    for name, value in params.items():
        module, _, part = name.partition(".lora_")
        if part:
            letter = {"a.kernel": "A", "b.kernel": "B"}[part]
            tensors[f"{PREFIX}{theirs[module]}.lora_{letter}.weight"] = np.ascontiguousarray(np.asarray(value).T)
    lora = config.lora
    values: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none",
        "base_model_name_or_path": assets.MODEL_ID if base == "default" else base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "inference_mode": True,
        "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "target_modules": sorted({theirs[module].rsplit(".", 1)[1] for module in _adapted(params)}),
        "layers_to_transform": None if lora.layers is None else list(lora.layers),
    }  # fmt: skip
    with outputs.whole_folder(folder) as made:
        outputs.save_tensors(made / WEIGHTS, tensors, {"format": "pt"})
        (made / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return folder


def load(folder: str | Path, config: TransformerConfig) -> tuple[LoraTransformerConfig, dict[str, np.ndarray]]:
    """Configuration of a decoder with a folder's adapters, and their parameters, bfloat16 ones widened to float32.

    Raises:
      ValueError: a file is missing or damaged, or the adapters are of another kind or for another decoder.
    """
    from safetensors.numpy import load_file

    folder = Path(folder)
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: cannot be read as PEFT's adapters ({error})") from error
    except Exception as error:  # safetensors' own type
        raise ValueError(f"{folder / WEIGHTS}: cannot be read ({error}); is the file cut short?") from error
    _check_kind(folder, values)
    targets, layers = _chosen(folder / CONFIG, values, config)
    try:
        lora = LoraConfig(
            rank=values["r"], alpha=_alpha(values), dropout=values.get("lora_dropout", 0.0), targets=targets,
            layers=layers,
        )  # fmt: skip
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise ValueError(f"{folder / CONFIG}: {'; '.join(problems)}") from error
    shape = with_lora(config, lora)
    names = {f"{PREFIX}{theirs}": ours for ours, theirs in _modules(shape).items()}
    params = {}
    for name, value in tensors.items():
        module, _, part = name.partition(".lora_")
        if module not in names or part not in ("A.weight", "B.weight"):
            raise ValueError(f"{folder / WEIGHTS}: {name} is no adapter of this decoder")
        value = value.astype(np.float32) if value.dtype.name == "bfloat16" else value  # PyTorch cannot take such arrays
        params[f"{names[module]}.lora_{part[0].lower()}.kernel"] = np.ascontiguousarray(value.T)
    _check_tensors(folder / WEIGHTS, shape, params)
    return shape, params


def _chosen(
    path: Path, values: Mapping[str, Any], config: TransformerConfig
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Return the projections and layers (None = all) that have adapters, by PEFT's rule for the names of modules."""
    named, excluded = values["target_modules"], values.get("exclude_modules") or ()
    layers = values.get("layers_to_transform")
    chosen = range(config.num_layers) if layers in (None, []) else layers if isinstance(layers, list) else [layers]
    if unknown := [i for i in chosen if type(i) is not int or not 0 <= i < config.num_layers]:
        raise ValueError(
            f"{path}: layers_to_transform has {unknown[0]!r}, wanted layers from 0 to {config.num_layers - 1}"
        )
    is_all = isinstance(named, str) and named.lower() == "all-linear"
    found: dict[str, set[int]] = {}
    for ours, theirs in _modules(config).items():
        _, index, _, target = ours.split(".")
        is_named = is_all or _is_named("target_modules", named, theirs, path)
        is_left_out = _is_named("exclude_modules", excluded, theirs, path)
        is_whole = isinstance(named, list) and theirs in named  # a whole name does not ask for the layer
        if is_named and not is_left_out and (is_whole or int(index) in chosen):
            found.setdefault(target, set()).add(int(index))
    if not found:
        said = {"exclude_modules": excluded, "layers_to_transform": layers}
        without = "".join(f" with {name}={str(value)[:60]!r}" for name, value in said.items() if value)
        example = next(iter(_modules(config).values()))
        raise ValueError(f"{path}: target_modules={str(named)[:60]!r}{without} leaves no projection, as {example}")
    (first, held), *others = found.items()
    for target, indices in others:
        if indices != held:
            said = f"{first} in layers {sorted(held)} and {target} in {sorted(indices)}"
            raise ValueError(f"{path}: adapts {said}; wanted the same projections in each layer that has adapters")
    return tuple(found), None if len(held) == config.num_layers else tuple(sorted(held))


def _is_named(field: str, names: str | list[str], module: str, path: Path) -> bool:
    """True if a setting names a module: by its whole name, the end of it, or a pattern of all of it."""
    if not isinstance(names, str):
        return any(module == name or module.endswith(f".{name}") for name in names)
    try:
        return re.fullmatch(names, module) is not None
    except re.error as error:
        raise ValueError(f"{path}: {field}={names[:60]!r} is no regular expression ({error})") from error


def _alpha(values: Mapping[str, Any]) -> float:
    """Return the alpha by which alpha / rank is PEFT's factor, alpha / sqrt(rank) if stabilised (arXiv:2312.03732)."""
    is_stabilised = values.get("use_rslora", False) and values["r"] > 0
    return values["lora_alpha"] * (math.sqrt(values["r"]) if is_stabilised else 1.0)


def _check_tensors(path: Path, shape: LoraTransformerConfig, params: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless a file has every adapter of a decoder and no other, in its shape, with finite numbers."""
    wanted = {name: of for name, of in initial.parameter_shapes(shape).items() if ".lora_" in name}
    if others := sorted(params.keys() - wanted.keys()):  # PEFT leaves them out, lora.config.merged would add them
        raise ValueError(
            f"{path}: {others[0]} is not adapted by the settings beside it, which name {', '.join(shape.lora.targets)} "
            f"in layers {'all' if shape.lora.layers is None else list(shape.lora.layers)}"
        )
    for name, of in wanted.items():
        if name not in params:
            raise ValueError(f"{path}: {name} is missing; the decoder's layers have {len(wanted)} adapter matrices")
        if params[name].shape != of:
            raise ValueError(f"{path}: {name} is {params[name].shape}, wanted {of} (in, out)")
        if not np.isfinite(params[name]).all():
            raise ValueError(f"{path}: {name} has numbers that are not finite")


def _check_kind(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise ValueError if adapters use a feature that is not implemented here, or these are no settings of any."""
    if not isinstance(values, dict):
        raise ValueError(f"{folder / CONFIG}: holds {str(values)[:60]!r}, wanted an object with PEFT's settings")
    wanted = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}
    for name, value in wanted.items():
        if values.get(name, value) != value:
            raise ValueError(f"{folder / CONFIG}: {name} is {values[name]!r}, and only {value!r} is read")
    if (initial := values.get("init_lora_weights", True)) not in INITIAL:
        raise ValueError(
            f"{folder / CONFIG}: init_lora_weights is {initial!r}, which changes the decoder's own weights; wanted "
            f"{', '.join(map(str, INITIAL))}: save it with PEFT's path_initial_model_for_weight_conversion"
        )
    for name in NOT_READ:
        if values.get(name):
            raise ValueError(f"{folder / CONFIG}: {name} is {str(values[name])[:60]}, which is not read")
    for name in ("r", "lora_alpha"):
        if not isinstance(values.get(name), int | float):
            raise ValueError(f"{folder / CONFIG}: {name} is {values.get(name)!r}, wanted a number")
    if not isinstance(values.get("use_rslora", False), bool):
        raise ValueError(f"{folder / CONFIG}: use_rslora is {str(values['use_rslora'])[:60]!r}, wanted true or false")
    for name in ("target_modules", "exclude_modules"):
        found = values.get(name, [] if name == "exclude_modules" else None)
        is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
        if not (is_list or isinstance(found, str) or (found is None and name == "exclude_modules")):
            said = str(found)[:60]
            raise ValueError(f"{folder / CONFIG}: {name} is no list of names and no regular expression, but {said!r}")
    if isinstance(values["target_modules"], str) and values.get("layers_to_transform") is not None:
        both = f"layers_to_transform={values['layers_to_transform']}, target_modules={values['target_modules'][:60]!r}"
        raise ValueError(f"{folder / CONFIG}: {both}: layers go with a list of names, not with a pattern")
    if values.get("layers_pattern") not in (None, "", [], "layers", ["layers"]):
        raise ValueError(f"{folder / CONFIG}: layers_pattern is {str(values['layers_pattern'])[:60]}, wanted layers")


def _adapted(params: Mapping[str, np.ndarray]) -> list[str]:
    return sorted({name.partition(".lora_")[0] for name in params if ".lora_" in name})


def _modules(config: TransformerConfig) -> dict[str, str]:
    """transformers' name of each projection.

    Raises:
      ValueError: the family fuses projections, as GPT-2 does.
    """
    family = families.HF_FAMILIES[hf_config.config_to_hf(plain(config))["model_type"]]
    found = {}
    for rule in family.rules:
        if rule.kind == "conv1d" or len(rule.ours) > 1:
            raise ValueError(f"peft: {rule.theirs} joins projections or lies transposed in this family; merge instead")
        if rule.kind == "linear" and "{i}" in rule.theirs:
            found |= {rule.ours[0].format(i=i): rule.theirs.format(i=i) for i in range(config.num_layers)}
    return found
