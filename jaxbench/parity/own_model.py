"""Prove a user's checkpoint in float64: the twins against each other, module by module, and against transformers.

The twins share the code that reads a checkpoint (families.py, weights.py), so only transformers' reader shows its bugs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import initial
from jaxbench.measure import environment
from jaxbench.parity import cases, distance, gates, run
from jaxbench.parity.capture import ROOT
from jaxbench.pretrained import families, weights

LENGTH = 64  # tokens per row, or fewer if the model takes fewer
LONGEST = 1024  # most tokens of the row compared with transformers, if passing a window takes that many
PAST_WINDOW = 16  # tokens of that row past the window
BYTES_PER_PARAMETER = 40  # in float64, at the peak; the default model's 134.5 million take 4.8 GiB
Result = dict[str, Any]


def case_of(path: Path, checkpoint: weights.Checkpoint) -> cases.Case:
    """Make the parity case of a checkpoint: every module's output, decoding and sampling; gradients if asked for.

    Raises:
      ValueError: the model takes too few tokens, or its proof does not fit into memory.
    """
    length = min(LENGTH, checkpoint.config.max_seq_len)
    if length < 4:
        raise ValueError(f"parity: {path} takes max_seq_len={length} tokens, wanted at least 4 to decode some")
    count, available = initial.num_parameters(checkpoint.config), environment.available_memory_bytes()
    needed = BYTES_PER_PARAMETER * count
    if needed > available:
        raise ValueError(
            f"parity: {path} has {count:,} parameters; its proof in float64 takes about {needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free"
        )
    return cases.Case(
        f"model/{path.stem}", None, length=length, prompt=length * 3 // 4, steps=0, gradients=False, sampled=True
    )


def against_transformers(case: cases.Case, path: Path, checkpoint: weights.Checkpoint) -> Result | str:
    """Compare torch_ref with transformers' model of the same file, or return why transformers does not read it."""
    from jaxbench.parity import torch_side
    from jaxbench.parity.oracles import transformers_model

    start = time.monotonic()
    reason = transformers_model.why_unread(path)
    if reason:
        return f"{case.id} is not compared with transformers, which does not read it: {reason}"
    rows, length = shape_of(case, checkpoint)
    tokens = np.random.default_rng(case.seed).integers(0, checkpoint.config.vocab_size, (rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    arrays = cases.Arrays(tokens, tokens, positions, np.ones(tokens.shape, bool))
    side = torch_side.Side(case, checkpoint.config, wide_params(path, checkpoint), dtype="float64")
    ours = side.trace(arrays, gradients=False, seed=None).outputs
    del side
    try:
        model = transformers_model.load(path)
    except ValueError as error:
        return _result(
            case, [gates.Gate("P11", "transformers loads it", False, 1.0, 0.0, ROOT, str(error))], None, start
        )
    theirs = _renamed(
        transformers_model.module_outputs(model, tokens), model.config, checkpoint.config.num_layers, ours
    )
    modules = {name: value for name, value in ours.items() if name in theirs}
    comparison = distance.compare(modules, {name: theirs[name] for name in modules}, kind="outputs")
    # The logits decide; modules only name the place, where both sides have one that returns the same.
    gate = gates.oracle(
        f"logits of {rows} x {length} tokens, float64",
        {ROOT: ours[ROOT]},
        {ROOT: theirs[ROOT]},
        source=transformers_model.name_of(model),
    )
    if not gate.passed and comparison.first_failure:
        gate = gate._replace(where=comparison.first_failure.name)
    return _result(case, [gate], comparison, start)


def shape_of(case: cases.Case, checkpoint: weights.Checkpoint) -> tuple[int, int]:
    """Rows and tokens compared with transformers: one long row if it takes that to pass the model's window.

    No rotary scaling requires more tokens: its frequencies differ from the first token on.
    """
    config, window = checkpoint.config, checkpoint.config.sliding_window
    plain = 2, case.length
    if window is None or window < case.length:
        return plain
    length = window + PAST_WINDOW
    widths = config.vocab_size + config.num_layers * (16 * config.d_model + 4 * config.d_ff)
    needed = 8 * length * (3 * widths + 4 * config.num_heads * length)  # both sides' outputs in float64, and scores
    available = environment.available_memory_bytes() - BYTES_PER_PARAMETER * initial.num_parameters(config)
    return (1, length) if length <= min(LONGEST, config.max_seq_len) and needed <= available else plain


def wide_params(path: Path, checkpoint: weights.Checkpoint) -> dict[str, np.ndarray]:
    """Return the parameters; Gemma's norms, which files store minus 1, get the 1 added in float64, as in the oracle.

    A norm that is not the file's value plus 1 in its type is left unchanged: the proof must see what was loaded.
    """
    if not path.is_dir() or checkpoint.config.activation != "geglu":
        return checkpoint.params
    params = dict(checkpoint.params)
    tensors, config, family, _ = weights.open_folder(path)
    for job in weights.plan(tensors, config, family):
        if job.rule.kind == "shifted":
            [name], stored = job.ours, tensors.read(job.name)
            if np.array_equal(params[name], stored + 1):
                params[name] = stored.astype(np.float64) + 1
    return params


def _renamed(
    outputs: dict[str, np.ndarray], config: Any, num_layers: int, ours: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """transformers' module outputs under our names and in our shapes; modules on only one side are left out."""
    found = {ROOT: outputs["model output"]}
    for rule in families.HF_FAMILIES[config.model_type].rules:
        for layer in range(num_layers):
            names, value = [name.format(i=layer) for name in rule.ours], outputs.get(rule.theirs.format(i=layer))
            if value is None or not all(name in ours for name in names):
                continue
            cuts = np.cumsum([ours[name].shape[-1] for name in names])[:-1]
            for name, part in zip(names, np.split(value, cuts, axis=-1), strict=True):
                shape = ours[name].shape
                found[name] = np.broadcast_to(part, shape) if part.shape[1:] == shape[1:] else part.reshape(shape)
    return found


def _result(case: cases.Case, rows: list[gates.Gate], comparison: distance.Comparison | None, start: float) -> Result:
    """Make a result in the form that run.run returns, for the report."""
    passed = all(row.passed for row in rows)
    entries = comparison.entries if comparison else ()
    first = {} if passed else {"outputs": rows[0].where}
    outcome = run.outcome(case, "transformers", rows, {}, worst=rows[0].error, first=first)
    layers = [{"module": entry.name, "float64": entry.error} for entry in entries]
    return outcome | {"layers": layers, "seconds": round(time.monotonic() - start, 2)}
