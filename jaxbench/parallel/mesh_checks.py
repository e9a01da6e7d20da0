"""Check whether a mesh fits the model and the batch (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

from collections.abc import Mapping

from jaxbench.config import TransformerConfig
from jaxbench.mesh import DATA, FSDP, MODEL, MODEL_Y, SEQUENCE, STAGE, ParallelConfig


def check(
    model: TransformerConfig, parallel: ParallelConfig, sizes: Mapping[str, int], *, batch: int, tokens: int
) -> None:
    """Check that a mesh of these sizes fits the model and the batch.

    Raises:
      ValueError: it does not; the message names the values and what would fit.
    """
    stages, micro = sizes[STAGE], parallel.micro_batches
    rows = sizes[DATA] * sizes[FSDP] * micro
    if batch % rows:
        raise ValueError(
            f"parallel: batch={batch} is not a multiple of data={sizes[DATA]} * fsdp={sizes[FSDP]} * "
            f"micro_batches={micro} = {rows}"
        )
    out = MODEL_Y if parallel.mesh.is_2d else MODEL
    if parallel.heads == "split" and (model.num_heads % sizes[out] or model.num_kv_heads % sizes[out]):
        raise ValueError(
            f"parallel: num_heads={model.num_heads} and num_kv_heads={model.num_kv_heads} are not both multiples of "
            f"{out}={sizes[out]}; heads=replicated keeps attention whole on every device of that axis"
        )
    parts = sizes[SEQUENCE] * (sizes[out] if parallel.sequence_parallel else 1)
    if tokens % parts:
        by = f"sequence={sizes[SEQUENCE]}" + (f" * {out}={sizes[out]}" if parallel.sequence_parallel else "")
        raise ValueError(f"parallel: rows of {tokens} tokens do not split into the {parts} parts of {by}")
    if stages > 1 or micro > 1:
        _check_pipeline(model, parallel, sizes, tokens=tokens)
    elif parallel.gradient_type != "full":
        _check_gradient_type(model, parallel, sizes)


def _check_pipeline(
    model: TransformerConfig, parallel: ParallelConfig, sizes: Mapping[str, int], *, tokens: int
) -> None:
    stages, micro, split = sizes[STAGE], parallel.micro_batches, sizes.get(MODEL, 1)
    if stages > model.num_layers or model.num_layers % stages:
        raise ValueError(f"parallel: num_layers={model.num_layers} do not split evenly into stage={stages} stages")
    if model.layer_kind is not None:
        raise ValueError(
            f"parallel: stage={stages} with micro_batches={micro} needs layers that are alike, and "
            f"some are of kind {model.layer_kind!r}; use data, fsdp and model"
        )
    if model.global_every is not None or model.logit_softcap is not None:
        raise ValueError(
            f"parallel: stage={stages} with micro_batches={micro} needs layers that are alike and plain logits, got "
            f"global_every={model.global_every} and logit_softcap={model.logit_softcap}; use data, fsdp and model"
        )
    if micro % stages:
        raise ValueError(f"parallel: micro_batches={micro} is not a multiple of stage={stages}")
    if parallel.mesh.is_2d or parallel.sequence_parallel:
        raise ValueError(
            f"parallel: stage={stages} with micro_batches={micro} goes with data, fsdp, sequence and model, not with "
            f"sequence_parallel={parallel.sequence_parallel} or the 2d form"
        )
    if sizes[SEQUENCE] > 1 and parallel.sequence_attention != "gathered":
        raise ValueError(
            f"parallel: in a pipeline, sequence={sizes[SEQUENCE]} needs sequence_attention=gathered, got "
            f"{parallel.sequence_attention}"
        )
    if sizes[SEQUENCE] > 1 and not model.is_causal:
        raise ValueError(
            f"parallel: in a pipeline, sequence={sizes[SEQUENCE]} needs a causal decoder, got "
            f"is_causal={model.is_causal}"
        )
    own_tokens = tokens // sizes[SEQUENCE]
    if model.d_ff % split or own_tokens % split:
        raise ValueError(
            f"parallel: in a pipeline, model={split} must divide d_ff={model.d_ff} and the {own_tokens} tokens of a "
            "device's part of a row"
        )
    if model.dropout:
        raise ValueError(f"parallel: dropout={model.dropout} is not supported over micro-batches, use dropout=0")


def _check_gradient_type(model: TransformerConfig, parallel: ParallelConfig, sizes: Mapping[str, int]) -> None:
    others = {axis: size for axis, size in sizes.items() if axis not in (STAGE, DATA, FSDP) and size > 1}
    if others:
        raise ValueError(
            f"parallel: gradient_type={parallel.gradient_type} goes with data and fsdp, and in a pipeline with model "
            f"and sequence, not with {others}"
        )
    if model.dropout:
        raise ValueError(
            f"parallel: dropout={model.dropout} is not supported with gradient_type={parallel.gradient_type}, use 0"
        )
