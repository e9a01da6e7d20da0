"""Bugs in files that all backends share, so that backends cannot disagree: an outside oracle must catch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxbench import initial, philox, rotary
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.parity.injection import Mutation
from jaxbench.pretrained import hf_config, weights
from jaxbench.text import dataset, packing
from jaxbench.training import schedules


def _frequencies_times(original: Callable, *args: Any) -> tuple[float, ...]:
    return tuple(1.5 * frequency for frequency in original(*args))


def _limits_swapped(original: Callable, head_dim: int, theta: float, scaling: RotaryScaling | None) -> Any:
    if scaling is None or scaling.kind != "llama3":
        return original(head_dim, theta, scaling)
    update = {"low_freq_factor": scaling.high_freq_factor, "high_freq_factor": scaling.low_freq_factor}
    return original(head_dim, theta, scaling.model_copy(update=update))


def _row_and_step_swapped(original: Callable, counter: tuple, key: tuple) -> Any:
    return original((counter[0], counter[2], counter[1], counter[3]), key)


def _narrow_normals(original: Callable, *args: Any, **options: Any) -> np.ndarray:
    return original(*args, **options) / np.sqrt(2.0)


def _one_noise(original: Callable, seed: int, *, step: int, site: str, num_elements: int) -> np.ndarray:
    return original(seed, step=step, site="weights", num_elements=num_elements)


def _scales_of_zero(original: Callable, *args: Any, **options: Any) -> dict[str, np.ndarray]:
    params = original(*args, **options)
    return {name: value - 1.0 if name.endswith(".scale") else value for name, value in params.items()}


def _final_fraction_ignored(original: Callable, schedule: Any, *args: Any, **options: Any) -> float:
    return original(schedule.model_copy(update={"final_fraction": 0.0}), *args, **options)


def _one_step_late(original: Callable, schedule: Any, step: int, **options: Any) -> float:
    return original(schedule, max(step - 1, 0), **options)


def _target_across_documents(original: Callable, self: dataset.PackedDataset, index: int) -> dataset.Batch:
    """Use the next document's first token as the target of a document's last."""
    row = original(self, index)
    targets, mask = row.targets.copy(), row.mask.copy()
    ends = np.flatnonzero(np.diff(row.segments) > 0)
    targets[ends], mask[ends] = row.tokens[ends + 1], True
    return row._replace(targets=targets, mask=mask)


def _positions_go_on(original: Callable, self: dataset.PackedDataset, index: int) -> dataset.Batch:
    row = original(self, index)
    return row._replace(positions=np.where(row.positions < 0, -1, np.arange(len(row.tokens))).astype(np.int32))


def _one_order_for_all(original: Callable, self: dataset.PackedDataset, site: str, epoch: int, count: int) -> Any:
    return original(self, site, 0, count)


def _query_and_key_swapped(original: Callable, *args: Any) -> dict[str, list[str]]:
    swapped = {"q_proj": "k_proj", "k_proj": "q_proj"}
    return {
        part: [_renamed(name, swapped) for name in names] if len(names) > 1 else names
        for part, names in original(*args).items()
    }


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return ".".join(names.get(step, step) for step in name.split("."))


def _eps_of_its_own(original: Callable, settings: Any) -> dict[str, Any]:
    return original(settings) | {"norm_eps": 1e-6}


def _yarn_factor_once(scaling: RotaryScaling) -> float:
    """Root of yarn's factor: as if only queries, and not keys too, were multiplied by it."""
    return (0.1 * np.log(scaling.factor) + 1.0) ** 0.5 if scaling.kind == "yarn" else 1.0


_ROTARY, _PHILOX, _INITIAL = (rotary, "frequencies"), (philox, "philox4x32"), (initial, "initial_params")
_RATES, _ROW = (schedules, "learning_rate"), (dataset.PackedDataset, "_row")
SHARED_BUGS: tuple[Mutation, ...] = tuple(
    Mutation(name, f"oracle/{oracle}", place, bug, side="shared")
    for name, oracle, place, bug in (
        ("rotary-frequencies-times-1.5", "rotary", _ROTARY, _frequencies_times),
        ("rotary-llama3-limits-swapped", "rotary", _ROTARY, _limits_swapped),
        ("rotary-scaling-ignored", "rotary", _ROTARY, lambda original, width, theta, _: original(width, theta, None)),
        ("philox-nine-rounds", "philox", (philox, "ROUNDS"), 9),
        ("philox-row-and-step-swapped", "philox", _PHILOX, _row_and_step_swapped),
        ("philox-halves-of-seed-swapped", "philox", (philox, "split_seed"),
         lambda original, seed: original(seed)[::-1]),
        ("philox-uniform-without-its-half", "philox", (philox, "uniform"),
         lambda original, words: original(words) - 2.0**-25),
        ("dropout-one-mask-for-all-layers", "philox", (philox, "dropout_sites"),
         lambda original, num_layers: original(1) * num_layers),
        ("dropout-one-mask-for-both-branches", "philox", (philox, "dropout_sites"),
         lambda original, num_layers: [(attention, attention) for attention, _ in original(num_layers)]),
        ("normal-of-half-the-variance", "philox", (philox, "normal"), _narrow_normals),
        ("initial-deviation-10-percent-off", "initial", _INITIAL,
         lambda original, *args, **options: original(*args, std=0.022, **options)),
        ("initial-one-noise-for-all", "initial", (philox, "normal"), _one_noise),
        ("initial-scales-of-zero", "initial", _INITIAL, _scales_of_zero),
        ("schedule-final-fraction-ignored", "schedules", _RATES, _final_fraction_ignored),
        ("schedule-one-step-late", "schedules", _RATES, _one_step_late),
        ("schedule-root-for-linear-scaling", "schedules", (schedules, "scaled_peak"),
         lambda original, peak, rule, **batch: original(peak, "sqrt", **batch)),
        ("packing-target-across-documents", "packing", _ROW, _target_across_documents),
        ("packing-positions-go-on", "packing", _ROW, _positions_go_on),
        ("packing-one-order-for-all-epochs", "packing", (dataset.PackedDataset, "_order"), _one_order_for_all),
        ("packing-prompt-one-token-late", "packing", (packing, "_first_tokens"),
         lambda original, tokenizer, paragraphs, length: original(tokenizer, paragraphs, length + 1)[1:]),
        ("families-query-and-key-swapped", "families", (weights, "_parts"), _query_and_key_swapped),
        ("families-rotary-rows-not-undone", "families", (weights, "rotate_half_rows"),
         lambda original, value, head_dim: value),
        ("families-yarn-factor-of-queries-alone", "families", (RotaryScaling, "magnitude"),
         property(_yarn_factor_once)),
        ("families-scores-by-head-width-alone", "families", (TransformerConfig, "query_scale"),
         property(lambda config: 1.0)),
        ("families-windows-in-the-other-layers", "families", (TransformerConfig, "at_layer"),
         lambda original, config, index: original(config, index + 1)),
        ("families-norm-eps-of-its-own", "families", (hf_config, "_llama_from_hf"), _eps_of_its_own),
    )
)  # fmt: skip
