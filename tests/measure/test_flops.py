"""Analytic FLOPs and bytes against numbers by hand and against XLA's own count."""

from __future__ import annotations

import pytest

from jaxbench import initial
from jaxbench.bench.tpu import SMOLLM2_135M
from jaxbench.config import TransformerConfig
from jaxbench.measure import flops

# Chosen so that every product is easy by hand: D = N H = 4, K H = 2, F = 8, V = 16, L = 1.
HAND = TransformerConfig(
    vocab_size=16, d_model=4, d_ff=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, max_seq_len=8
)
WIDE = TransformerConfig(
    vocab_size=1024, d_model=256, d_ff=640, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_seq_len=64
)


def test_prefill_of_two_rows_of_three_tokens_by_hand():
    cost = flops.prefill_cost(HAND, batch=2, prompt_tokens=3, dtype="float32")
    assert cost.parts == {
        "projections": 2 * 6 * (4 * 4 + 4 * 2 + 4 * 2 + 4 * 4),  # q k v o
        "scores": 2 * 2 * (2 * 3 * 3) * 4,  # q k^T and p v: B T S N H each, masked keys included
        "mlp": 2 * 6 * 3 * 4 * 8,  # gate, up, down
        "head": 2 * 2 * 4 * 16,  # one position a row
    }
    assert cost.flops == 576 + 288 + 1152 + 256
    weights = 16 * 4 + (4 * 4 + 4 * 2 + 4 * 2 + 4 * 4) + 3 * 4 * 8 + 3 * 4  # embedding, attention, mlp, norms
    cache = 2 * 2 * 3 * 2  # keys and values, B T K H
    assert cost.bytes == 4 * (weights + cache + 2 * 16)


def test_decode_step_by_hand():
    cost = flops.decode_cost(HAND, batch=2, cache_length=5, dtype="bfloat16")
    assert cost.flops == 2 * 2 * 48 + 4 * 2 * 5 * 4 + 2 * 2 * 96 + 2 * 2 * 64
    assert cost.bytes == 2 * (220 + 2 * 2 * 6 * 2 + 2 * 16)


@pytest.mark.parametrize(("tokens", "most"), [(37, 1.02), (128, 1.021), (512, 1.02), (4096, 1.101)])
def test_masked_keys_make_the_count_as_much_above_the_least_as_the_report_says(tokens, most):
    cost = flops.prefill_cost(SMOLLM2_135M, batch=1, prompt_tokens=tokens, dtype="float32")
    visible = tokens * (tokens + 1) // 2
    scores = 4 * visible * SMOLLM2_135M.num_heads * SMOLLM2_135M.head_dim * SMOLLM2_135M.num_layers
    least = cost.flops - cost.parts["scores"] + scores
    assert 1 < cost.flops / least < most


def test_train_step_is_three_forwards_with_the_head_everywhere():
    cost = flops.train_cost(HAND, batch=1, seq_len=3, dtype="float32")
    assert cost.flops == 3 * (2 * 3 * 48 + 4 * 3 * 3 * 4 + 2 * 3 * 96 + 2 * 3 * 64)


def test_train_traffic_of_a_chip_that_stores_a_quarter_by_hand():
    shape = {"batch": 2, "seq_len": 3, "dtype": "bfloat16", "stored_parameters": 25, "used_parameters": 100}
    weights = 100 * 2 * 2 + 25 * (
        3 * 2 + 4 * 4
    )  # used: read twice; stored: weight, gradient twice, moments 4 x 4 bytes
    assert flops.train_cost(HAND, **shape).bytes == weights + 4 * 2 * 3 * 16 * 2
    assert flops.train_cost(HAND, **shape, vocab_chips=4).bytes == weights + 4 * 2 * 3 * 4 * 2


def test_smollm2_has_its_published_number_of_parameters():
    assert initial.num_parameters(SMOLLM2_135M) == 134_515_008
    assert flops.parameter_bytes(SMOLLM2_135M, "bfloat16") == 269_030_016
    assert flops.kv_cache_bytes(SMOLLM2_135M, batch=1, length=1, dtype="bfloat16") == 2 * 30 * 3 * 64 * 2


def test_untied_and_position_tables_are_read_by_row():
    tied = flops.decode_cost(HAND, batch=1, cache_length=1, dtype="float32").bytes
    untied = flops.decode_cost(
        HAND.model_copy(update={"tie_embeddings": False}), batch=1, cache_length=1, dtype="float32"
    )
    assert untied.bytes - tied == 4 * 4  # the row that is looked up; the head takes the table's place
    learned = HAND.model_copy(update={"position": "learned"})
    assert flops.decode_cost(learned, batch=1, cache_length=1, dtype="float32").bytes - tied == 4 * 4


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="dtype='int4'"):
        flops.parameter_bytes(HAND, "int4")


@pytest.mark.parametrize("program", ["prefill", "decode", "train"])
def test_xla_counts_the_same_flops_within_its_elementwise_work(program):
    import functools

    import jax

    from jaxbench.parallel import mesh_programs

    plan = functools.partial(mesh_programs.make_plan, WIDE, jax.devices()[:1])
    model = mesh_programs.abstract_model(WIDE, dtype="float32", scan_layers=False)
    make = {
        "prefill": lambda: mesh_programs.prefill(model, plan(batch=2, tokens=32), batch=2, tokens=32),
        "decode": lambda: mesh_programs.decode(model, plan(batch=8, tokens=1), batch=8, length=64),
        "train": lambda: mesh_programs.train(model, plan(batch=2, tokens=32), batch=2, tokens=32),
    }[program]()
    cost = {
        "prefill": lambda: flops.prefill_cost(WIDE, batch=2, prompt_tokens=32, dtype="float32"),
        "decode": lambda: flops.decode_cost(WIDE, batch=8, cache_length=64, dtype="float32"),
        "train": lambda: flops.train_cost(WIDE, batch=2, seq_len=32, dtype="float32"),
    }[program]()
    counted = make.jitted.lower(*make.arguments).cost_analysis()["flops"]
    # XLA adds elementwise work: norms, softmax, rotary, and in training AdamW's dozen operations a parameter.
    elementwise = {"prefill": 0.04, "decode": 0.04, "train": 0.12}[program]
    assert 1.0 <= counted / cost.flops <= 1 + elementwise
