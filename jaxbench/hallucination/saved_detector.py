"""A fitted detector, or a vote of several, as one safetensors file, which records its reader and features (S file)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.hallucination import extract
from jaxbench.hallucination.detector import Detector, Member, Tuned
from jaxbench.hallucination.linear import Linear
from jaxbench.hallucination.ragtruth import Data
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.token_inputs import Scale, TokenConfig, Trained
from jaxbench.hallucination.tuned_inputs import TunedConfig
from jaxbench.hallucination.voting import Ensemble, majority
from jaxbench.pretrained import safetensors_files

FORMAT = 4
VOTE_FORMAT = 1  # of what a vote adds to the format of its members
CODE = (
    *extract.CODE, "response_features.py", "pooled.py", "lexical.py", "sentences.py", "detector.py", "token_inputs.py",
    "token_scoring.py", "tuned_inputs.py", "tuned_reader.py", "tuned_reading.py", "lower_reader.py",
)  # fmt: skip
VOTE_CODE = (*CODE, "voting.py")
STACK, TUNED, WEIGHING = "stack", "tuned.", "tuned_weighing"


class Saved(NamedTuple):
    """A detector, and the reader whose features it takes."""

    detector: Detector | Ensemble
    settings: ReaderSettings  # without the model, which its checksum identifies
    model_sha256: str
    contexts: tuple[str, ...] = ()  # context_id of each that it was fitted to, as far as known


def context_id(context: str) -> str:
    """Return what stands for a context in a detector's file: the beginning of its SHA-256."""
    return hashlib.sha256(context.encode()).hexdigest()[:16]


def save(path: str | Path, saved: Saved) -> None:
    """Write a detector, or a vote of several, atomically."""
    about, tensors = {"model_sha256": saved.model_sha256, "contexts": list(saved.contexts)}, {}
    about["reader"] = saved.settings.model_dump(exclude={"model"})
    if isinstance(saved.detector, Ensemble):
        voted = saved.detector._asdict()
        members = [_written(member) for member in voted.pop("members")]
        for i, (_, mine) in enumerate(members):
            tensors |= {f"{i}/{name}": values for name, values in mine.items()}
        about |= {"format": FORMAT, "code": extract.code_version(VOTE_CODE), "vote_format": VOTE_FORMAT}
        about["vote"] = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in voted.items()}
        about["vote_members"] = [mine for mine, _ in members]
    else:
        mine, tensors = _written(saved.detector)
        about |= {"format": FORMAT, "code": extract.code_version(CODE)} | mine
    outputs.save_tensors(path, tensors, {"detector": json.dumps(about)})


def _written(detector: Detector) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what a file says about one detector, and its arrays by name."""
    regressions, tuned = {**detector.fitted, STACK: detector.stack}, detector.tuned
    if tuned is not None:
        regressions[WEIGHING] = tuned.weighing
    tensors = {
        f"{name}.{field}": np.ascontiguousarray(value, np.float64)
        for name, regression in regressions.items()
        for field, value in regression._asdict().items()
    }
    for i, one in enumerate(detector.tokens):
        arrays = {**one.params, **one.scale._asdict()}
        tensors |= {f"tokens.{i}.{name}": np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    if tuned is not None:
        tensors |= {TUNED + name: np.ascontiguousarray(value, np.float32) for name, value in tuned.trained.items()}
    about = {
        # their order is that of the stack's columns
        "members": {name: member._asdict() for name, member in detector.members.items()},
        "threshold": float(detector.threshold), "part_threshold": float(detector.part_threshold),
        "token_threshold": float(detector.token_threshold),
        "tokens": [one.config.model_dump() for one in detector.tokens],
        "tuned": None if tuned is None else tuned.config.model_dump(),
    }  # fmt: skip
    return about, tensors


def load(path: str | Path) -> Saved:
    """Read a detector, or a vote of several.

    Raises:
      ValueError: the file is missing, damaged or not a detector, or was fitted to features of other code.
    """
    if Path(path).is_dir():  # of `export`, whose files are for other runtimes
        raise ValueError(f"detector: {path} is a folder, wanted the file that `hallucination.py fit` writes")
    if not Path(path).is_file():
        raise ValueError(f"detector: {path} is no file; `hallucination.py fit` makes one")
    about, tensors = safetensors_files.annotated(Path(path), "detector")
    code = extract.code_version(VOTE_CODE if "vote" in about else CODE)
    if about.get("format") != FORMAT or about.get("code") != code or about.get("vote_format", 1) != VOTE_FORMAT:
        raise ValueError(f"detector: {path} was fitted to features of another version of jaxbench; fit it again")
    bad = [name for name, values in tensors.items() if not np.isfinite(values).all()]
    if bad:
        raise ValueError(f"detector: {path}: {bad[0]} is not finite; fit it again")
    rest = (ReaderSettings(**about["reader"]), about["model_sha256"], tuple(about["contexts"]))
    return Saved(_voted(about, tensors) if "vote" in about else _read(about, tensors), *rest)


def _voted(about: dict[str, Any], tensors: dict[str, np.ndarray]) -> Ensemble:
    members, vote = [], about["vote"]
    for i, mine in enumerate(about["vote_members"]):
        own = {name.removeprefix(f"{i}/"): each for name, each in tensors.items() if name.startswith(f"{i}/")}
        members.append(_read(mine, own))
    arrays = {name: np.array(vote[name]) for name in ("weights", "aucs", "own_thresholds") if vote[name] is not None}
    return Ensemble(tuple(members), **vote | arrays | {"names": tuple(vote["names"])})


def _read(about: dict[str, Any], tensors: dict[str, np.ndarray]) -> Detector:
    """Return one detector of what `_written` gave."""
    members = {
        name: Member(tuple(each["families"]), each["of_parts"], each["strength"])
        for name, each in about["members"].items()
    }
    names = (*members, STACK, *([WEIGHING] if about["tuned"] else []))
    regressions = {name: Linear(*(tensors[f"{name}.{field}"] for field in Linear._fields)) for name in names}
    tuned = None
    if about["tuned"]:
        trained = {name.removeprefix(TUNED): each for name, each in tensors.items() if name.startswith(TUNED)}
        tuned = Tuned(TunedConfig(**about["tuned"]), trained, regressions.pop(WEIGHING))
    stack = regressions.pop(STACK)
    tokens = tuple(_token_classifier(tensors, i, config) for i, config in enumerate(about["tokens"]))
    thresholds = (about[name] for name in ("threshold", "part_threshold"))
    return Detector(members, regressions, stack, *thresholds, tokens, about["token_threshold"], tuned)


def load_several(paths: Sequence[str | Path]) -> Saved:
    """Read the one detector of a list of files, or the hard vote of several.

    Raises:
      ValueError: as `load`, `joined` and voting.check.
    """
    found = [load(path) for path in paths]
    if len(found) == 1:
        return found[0]
    return joined(found, paths)._replace(detector=majority([each.detector for each in found], names_of(paths)))


def names_of(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return what the members of a vote are called: their files' names, or paths where these are not different.

    Raises:
      ValueError: a file is named twice.
    """
    whole = [str(path) for path in paths]
    resolved = [Path(path).resolve() for path in paths]
    twice = [path for path, each in zip(whole, resolved) if resolved.count(each) > 1]
    if twice:
        raise ValueError(f"--detector={twice[0]} is named {len(twice)} times, wanted each detector once")
    stems = [Path(path).stem for path in paths]
    return tuple(stems if len(set(stems)) == len(stems) else whole)


def joined(found: Sequence[Saved], paths: Sequence[str | Path]) -> Saved:
    """Return what detectors of one vote share: reader, model, and all contexts that any of them was fitted to.

    Raises:
      ValueError: they differ in model or in a setting of the reader; both files are named.
    """
    first = found[0]
    for each, path in zip(found[1:], paths[1:], strict=True):
        if each.model_sha256 != first.model_sha256:
            raise ValueError(
                f"vote: {paths[0]} was fitted with the model of checksum {first.model_sha256[:12]}, and {path} with "
                f"{each.model_sha256[:12]}; wanted detectors of one reader"
            )
        for name in sorted({*first.settings.identity(), "bits"}):
            mine, other = (getattr(one.settings, name) for one in (first, each))
            if mine != other:
                raise ValueError(
                    f"vote: {paths[0]} was fitted to a reader of {name}={mine}, and {path} to {name}={other}; wanted "
                    "detectors of one reader"
                )
    return first._replace(contexts=tuple(sorted({context for each in found for context in each.contexts})))


def _token_classifier(tensors: dict[str, np.ndarray], number: int, config: dict[str, Any]) -> Trained:
    prefix = f"tokens.{number}."
    mine = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    scale = Scale(*(mine.pop(field) for field in Scale._fields))
    return Trained(TokenConfig(**config), mine, scale)


def check_model(saved: Saved, model_sha256: str, *, name: str) -> None:
    """Check that a reader is the one that a detector was fitted with.

    Raises:
      ValueError: it is another.
    """
    if saved.model_sha256 != model_sha256:
        raise ValueError(
            f"detector: fitted with the model of checksum {saved.model_sha256[:12]}, and {name} has "
            f"{model_sha256[:12]}; name that model, or fit a detector with this one"
        )


def check_unseen(saved: Saved, data: Data, *, folder: str | Path) -> None:
    """Check that a detector was fitted to none of a folder's contexts.

    Raises:
      ValueError: it was.
    """
    known = sorted(name for name, source in data.sources.items() if context_id(source.context) in {*saved.contexts})
    if known:
        raise ValueError(
            f"--data={folder}: the detector was fitted to {len(known)} of its {len(data.sources)} contexts, first that "
            f"of source {known[0]}; wanted contexts that it has not seen"
        )


def check_settings(saved: Saved, settings: ReaderSettings, named: Collection[str]) -> None:
    """Check that the reader settings a user named equal those a detector was fitted to, which are the ones used.

    named: names of settings. Those that affect no feature, such as row_tokens, may differ, and the model is checked by
    its checksum.

    Raises:
      ValueError: one differs.
    """
    for name in sorted({*named} & {*saved.settings.identity(), "bits"}):
        fitted, given = getattr(saved.settings, name), getattr(settings, name)
        if given != fitted:
            raise ValueError(
                f"detector: fitted to a reader of {name}={fitted}, and the settings say {name}={given}; leave {name} "
                "out, or fit a detector to such a reader"
            )
