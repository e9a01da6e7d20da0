"""Read and write checkpoints: GGUF file, Hugging Face folder or hub id <-> {dotted name: numpy array} (S file).

The tables of families.py translate names and layouts. Reading is strict: every parameter must be present with its shape
and finite values, and every tensor of the file must be used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.config import TransformerConfig, shown
from jaxbench.initial import mismatches, parameter_shapes
from jaxbench.pretrained import (
    assets,
    chat_template,
    compressed_tensors,
    families,
    gguf_config,
    gguf_file,
    hf_config,
    safetensors_files,
)
from jaxbench.pretrained.families import Family, Rule
from jaxbench.process_environment import usable_cores
from jaxbench.quantization.grids import Quantized

HUB_ID = r"[\w.-]+(/[\w.-]+)?"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", chat_template.DEFAULT_FILE)
TEXT_FILES += (chat_template.TOOLS_FILE, "special_tokens_map.json", "added_tokens.json")
INDEX = "model.safetensors.index.json"  # of several files of weights
HUB_FILES = ["config.json", "*.safetensors", INDEX, *TEXT_FILES]
# Our name of a module's main tensor, if it is not "kernel".
WEIGHT = {"embed": "embedding", "norm": "scale", "shifted": "scale"}
ALIGNMENT = 64  # bytes, a cache line; XLA:CPU uses a host array without a copy from this alignment on
MAX_LISTED = 8  # names shown of each kind of problem


class Checkpoint(NamedTuple):
    """A model as read: shape, parameters by dotted name, and their source."""

    config: TransformerConfig
    params: dict[str, np.ndarray]  # float32, or float64 where the file has it; kernels are (in, out); read-only
    tokenizer: Path  # what load_tokenizer reads: the GGUF file or the folder
    source: str  # shown in records
    sha256: str  # of the GGUF file; of a folder, over config.json, its files of weights and what load_tokenizer reads


class Tensors(NamedTuple):
    """The tensors of a file or folder, whatever its format."""

    source: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]  # float32 or float64 values of one tensor; may be called from several threads
    matrices: Mapping[str, Callable[[], Quantized]] = {}  # a folder's quantised tensors, as stored
    activations: str = "float"  # compressed_tensors.Layout's; only quantization.folder_import reads these two
    input_ranges: Mapping[str, Callable[[], float]] = {}


def load_checkpoint(spec: str | Path | None = None) -> Checkpoint:
    """Load a model: None or "default", a GGUF file, a Hugging Face folder, or a hub id.

    Raises:
      ValueError: an unsupported architecture, a damaged file, or missing, unused, misshapen or non-finite tensors.
    """
    path = resolve(spec)
    if path.is_dir():
        tensors, config, family, sha256 = open_folder(path)
    else:
        file = gguf_file.read(path)
        config = gguf_config.config_from_gguf(file)
        family = families.GGUF_FAMILIES[file.metadata["general.architecture"]]
        tensors = Tensors(path, {name: info.shape for name, info in file.tensors.items()}, file.tensor)
        sha256 = assets.MODEL_SHA256 if spec in (None, "default") else assets.sha256_file(path)
    return Checkpoint(config, _convert(tensors, config, family), path, path.name, sha256)


def read_config(spec: str | Path | None = None) -> TransformerConfig:
    """Read a model's configuration, without reading a tensor.

    Raises:
      ValueError: an unsupported architecture, or a damaged file.
    """
    path = resolve(spec)
    if path.is_dir():
        return hf_config.config_from_hf(safetensors_files.read_json(path / "config.json"), path / "config.json")
    return gguf_config.config_from_gguf(gguf_file.read(path))


def resolve(spec: str | Path | None = None) -> Path:
    """Return the path of the GGUF file or Hugging Face folder that a model's name stands for, fetched if necessary.

    Raises:
      ValueError: nothing has this name, or it cannot be fetched.
    """
    if spec in (None, "default"):
        return assets.fetch_default_model()
    wanted = "pass a GGUF file, a Hugging Face folder, a hub id or `default`"
    if not str(spec):
        raise ValueError(f"model: {spec!r} names nothing; {wanted}")
    path = Path(spec).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(HUB_ID, str(spec)) or str(spec).endswith((".gguf", ".safetensors", ".json")):
        raise ValueError(f"model: {spec} does not exist; {wanted}")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(spec), allow_patterns=HUB_FILES))
    except Exception as error:  # the client raises many unrelated types: requests', httpx's, its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model: {spec} is no file or folder here, and fetching it as a hub id failed "
            f"({type(error).__name__}: {reason}); check the name and the network, "
            "or pass a GGUF file, a folder or `default`"
        ) from error


def checksum(spec: str | Path | None = None) -> str:
    """Compute a model's SHA-256, as in Checkpoint.sha256, without reading a tensor.

    Raises:
      ValueError: see resolve; or a folder's files of weights are missing.
    """
    path = resolve(spec)
    if path.is_dir():
        return _folder_checksum(path, _weight_files(path)[1])
    return assets.MODEL_SHA256 if spec in (None, "default") else assets.sha256_file(path)


def _folder_checksum(folder: Path, files: list[Path]) -> str:
    texts = [folder / name for name in TEXT_FILES if (folder / name).is_file()]
    lines = [f"{file.name} {assets.sha256_file(file)}\n" for file in [folder / "config.json", *files, *texts]]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def save_checkpoint(
    folder: str | Path,
    config: TransformerConfig,
    params: dict[str, np.ndarray],
    *,
    tokenizer: Any = None,
    matrices: Mapping[str, Mapping[str, np.ndarray]] = {},
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder that transformers and load_checkpoint read, atomically.

    The tokenizer's begin and end ids are written to config.json and generation_config.json, null if there are none:
    transformers would use its own defaults otherwise. The latter also gets the tokenizer's generation_settings.

    Args:
      matrices: tensors that replace a module's kernel, by module and by the last part of their names
        (compressed_tensors.stored); quantization is their description in config.json.

    Raises:
      ValueError: the folder has content, parameters do not fit the configuration, or no architecture matches it.
    """

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"save: {folder} exists and is not an empty folder; choose another name or remove it")
    if config.layer_kind is not None:
        raise ValueError(f"save: no Hugging Face architecture has layers of kind {config.layer_kind!r}")
    values = hf_config.config_to_hf(config)
    wanted = parameter_shapes(config)
    shapes = {name: np.shape(value) for name, value in params.items()}
    shapes |= {f"{module}.kernel": wanted.get(f"{module}.kernel", ()) for module in matrices}
    _raise_problems("save", mismatches(wanted, shapes))
    tensors = {}
    for rule, layer in _rows(families.HF_FAMILIES[values["model_type"]], config):
        for part, ours in _parts(rule, layer, shapes).items():
            theirs = f"{rule.theirs.format(i=layer)}.{part}"
            held = matrices.get(ours[0].removesuffix(".kernel"))
            if part == "weight" and held is not None:
                if rule.kind != "linear":
                    raise ValueError(f"save: {theirs} is a {rule.kind}, and only linear layers are written quantised")
                tensors |= {f"{rule.theirs.format(i=layer)}.{name}": value for name, value in held.items()}
                continue
            value = np.concatenate([np.asarray(params[name]) for name in ours], axis=-1)
            value = value - 1 if rule.kind == "shifted" else value
            tensors[theirs] = np.ascontiguousarray(value.T if rule.kind == "linear" else value)
    dtypes = {str(np.asarray(value).dtype) for value in params.values()}
    values |= {} if quantization is None else {"quantization_config": quantization}
    with outputs.whole_folder(folder) as made:
        outputs.save_tensors(made / "model.safetensors", tensors, {"format": "pt"})
        ends = list(getattr(tokenizer, "end_ids", ()))
        eos_id = ends if len(ends) > 1 else getattr(tokenizer, "eos_id", None)
        ids = {"bos_token_id": getattr(tokenizer, "bos_id", None), "eos_token_id": eos_id}
        values |= ids | {"dtype": dtypes.pop() if len(dtypes) == 1 else "float32"}
        generation = dict(getattr(tokenizer, "generation_settings", {})) | ids
        for name, content in (("config.json", values), ("generation_config.json", generation)):
            (made / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(made)
    return folder


def open_folder(folder: Path) -> tuple[Tensors, TransformerConfig, Family, str]:
    """Read a Hugging Face folder's configuration and tables of contents.

    Raises:
      ValueError: see load_checkpoint.
    """
    values = safetensors_files.read_json(folder / "config.json")
    config = hf_config.config_from_hf(values, folder / "config.json")
    weight_map, files = _weight_files(folder)
    shapes, types, read = safetensors_files.opened(files)
    if weight_map is not None:
        _raise_problems(str(folder / INDEX), {"missing in the files": sorted(set(weight_map) - set(shapes))})
    tensors = _tensors(folder, values.get("quantization_config"), shapes, types, read)
    return tensors, config, families.HF_FAMILIES[values["model_type"]], _folder_checksum(folder, files)


def _weight_files(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """A folder's index, None without one, and the files that hold its weights: others beside them are not read.

    Raises:
      ValueError: files are missing, or there are two sets of weights.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = safetensors_files.weight_map(index)
        files = sorted({folder / name for name in weight_map.values()})
        whole = folder / "model.safetensors"  # the only file that transformers reads, if it exists
        if whole.is_file() and files not in ([], [whole]):
            raise ValueError(
                f"{folder}: holds model.safetensors beside an index of {files[0].name} and others, wanted one of them; "
                "transformers reads the former"
            )
    else:
        weight_map, files = None, [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{folder}: missing {', '.join(missing) or 'weights: the index names no file'}")
    return weight_map, files


def _tensors(folder: Path, quantization: Any, shapes: dict, types: dict, read: Callable) -> Tensors:
    """The tensors of a folder; integer ones are reassembled as its quantization_config says."""
    matrices, activations, input_ranges = {}, "float", {}
    if quantization is not None:
        if not isinstance(quantization, dict):
            raise ValueError(f"{folder}: quantization_config is {shown(quantization)}, wanted an object")
        layout = compressed_tensors.layout(quantization, folder / "config.json")
        shapes, matrices, input_ranges = compressed_tensors.opened(shapes, types, read, layout, folder)
        activations = layout.activations
    for name in shapes.keys() - matrices.keys():
        is_stray = name.rpartition(".")[2] in compressed_tensors.PARTS  # of any type; plan says that it is unused
        if types[name] not in ("F64", "F32", "F16", "BF16") and not is_stray:
            raise ValueError(f"{folder}: tensor {name} has type {types[name]}, wanted F64, F32, F16 or BF16")

    def floats(name: str) -> np.ndarray:
        if name in matrices:
            return compressed_tensors.dequantized(matrices[name](), name, folder)
        value = read(name)
        return value if value.dtype == np.float64 else value.astype(np.float32, copy=False)

    return Tensors(folder, shapes, floats, matrices, activations, input_ranges)


def _rows(family: Family, config: TransformerConfig) -> list[tuple[Rule, int]]:
    """Rules of a family with their layer; a layer's rules appear once for each layer."""
    return [
        (rule, layer)
        for rule in family.rules
        for layer in (range(config.num_layers) if "{i}" in rule.theirs else range(1))
    ]


def _parts(rule: Rule, layer: int, wanted: dict[str, Any]) -> dict[str, list[str]]:
    """Our names of one row by part, {"weight": [..], "bias": [..]}, without those that the configuration lacks."""
    names = {
        "weight": [f"{name.format(i=layer)}.{WEIGHT.get(rule.kind, 'kernel')}" for name in rule.ours],
        "bias": [f"{name.format(i=layer)}.bias" for name in rule.ours],
    }
    return {part: ours for part, ours in names.items() if ours[0] in wanted}


class Job(NamedTuple):
    """One tensor of a file and the parameters that it holds."""

    rule: Rule
    name: str  # in the file
    ours: list[str]
    widths: list[int]  # of each of ours along their outputs


def plan(tensors: Tensors, config: TransformerConfig, family: Family) -> list[Job]:
    """List every tensor of a file with its parameters, and check that all are there with their shapes.

    Raises:
      ValueError: tensors are missing, unused or misshapen; all names are listed.
    """
    if config.num_layers > len(tensors.shapes):  # before names are listed: a header may claim billions
        count = len(tensors.shapes)
        raise ValueError(f"{tensors.source}: says it has {config.num_layers} layers, and holds {count} tensors in all")
    shapes, own_names = parameter_shapes(config), _own_names(tensors, family, config)
    jobs, expected = [], {}
    for rule, layer in _rows(family, config):
        for part, ours in _parts(rule, layer, shapes).items():
            theirs = f"{rule.theirs.format(i=layer)}.{part}"
            widths = [shapes[name][-1] for name in ours]
            shape = (*shapes[ours[0]][:-1], sum(widths))
            expected[theirs] = shape[::-1] if rule.kind in ("linear", "interleaved") else shape
            jobs.append(Job(rule, theirs, ours, widths))
    in_file = {name: tensors.shapes[own] for name, own in own_names.items()}
    _raise_problems(str(tensors.source), mismatches(expected, in_file))
    return [job._replace(name=own_names[job.name]) for job in jobs]


def values_of(tensors: Tensors, job: Job, config: TransformerConfig) -> dict[str, np.ndarray] | None:
    """Parameters of one tensor by name, in our layout; None if it has NaN or infinite values."""
    value = tensors.read(job.name)
    if not (np.isfinite(value.min()) and np.isfinite(value.max())):
        return None
    if job.rule.kind == "interleaved":
        value = rotate_half_rows(value, config.head_dim)
    value = value + 1 if job.rule.kind == "shifted" else value  # rounded in its own type, as in transformers' module
    value = value.T if job.rule.kind in ("linear", "interleaved") else value
    split = np.split(value, np.cumsum(job.widths)[:-1], axis=-1)
    return {name: _aligned(v) for name, v in zip(job.ours, split, strict=True)}


def read_all(source: Path, jobs: list[Job], work: Callable[[Job], dict | None]) -> dict[str, Any]:
    """Apply `work` to every tensor and merge its results by parameter name; threaded, because NumPy releases the lock.

    Raises:
      ValueError: work returned None for a tensor, which then has NaN or infinite values.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        results = list(pool.map(work, jobs))
    bad = [job.name for job, found in zip(jobs, results, strict=True) if found is None]
    _raise_problems(str(source), {"with NaN or infinite values": bad})
    return {name: value for found in results for name, value in found.items()}


def _convert(tensors: Tensors, config: TransformerConfig, family: Family) -> dict[str, np.ndarray]:
    """Translate a file's tensors, strictly."""
    jobs = plan(tensors, config, family)
    params = read_all(tensors.source, jobs, lambda job: values_of(tensors, job, config))
    return {name: params[name] for name in parameter_shapes(config)}


def _own_names(tensors: Tensors, family: Family, config: TransformerConfig) -> dict[str, str]:
    """Map names of the family's table to those in the file, which may lack the prefix; no buffers and no tied head."""
    own_names = {}
    has_prefix = any(name.startswith(family.prefix) for name in tensors.shapes)
    for own in tensors.shapes:
        if re.fullmatch(family.ignored, own):
            continue
        name = own if has_prefix or own.startswith("lm_head.") else family.prefix + own
        own_names[name] = own
    if config.tie_embeddings and "lm_head.weight" in own_names:
        embedding = own_names.get(family.rules[0].theirs + ".weight")
        if embedding is None or np.array_equal(tensors.read(own_names["lm_head.weight"]), tensors.read(embedding)):
            del own_names["lm_head.weight"]
    return own_names


def rotate_half_rows(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows, one per output, from llama.cpp's order to ours: adjacent pairs -> first halves, then second
    halves, in each head.
    """
    pairs = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def _aligned(value: np.ndarray) -> np.ndarray:
    """Copy to a read-only row-major array at a multiple of 64 bytes, which JAX on a CPU uses without another copy."""
    room = np.empty(value.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    np.copyto(copy, value)
    copy.flags.writeable = False
    return copy


def _raise_problems(source: str, problems: dict[str, list[str]]) -> None:
    """Raise one error that lists every kind of problem with its tensors, if there are any."""
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:MAX_LISTED])}{more}")
    if parts:
        raise ValueError(f"{source}: tensors do not fit the model; {'; '.join(parts)}")
