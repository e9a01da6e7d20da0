"""Collectives beside products: read from a schedule by hand, and from a TPU's compiler for a small decoder."""

import json
import os
import subprocess
import sys

import pytest

from jaxbench.measure import hlo, tpu_compile
from jaxbench.training import tpu_train
from tests.structure import ROOT

SIZE = 16 * 8 * 4  # bytes of a gathered array
PAIRS = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%product (a: f32[16,8]) -> f32[16,16] {
  ROOT %dot.1 = f32[16,16]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%elementwise (a: f32[16,8]) -> f32[16,8] {
  ROOT %negate.1 = f32[16,8]{1,0} negate(%a)
}

%gather (a: f32[4,8]) -> f32[16,8] {
  ROOT %all-gather.3 = f32[16,8]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}
}

%spread_start (a: f32[4,8]) -> f32[16,8] {
  ROOT %all-gather.7 = f32[16,8]{1,0} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="2"}
}

%spread_middle (a: f32[4,8]) -> f32[16,8] {
  %convolution.1 = f32[16,16]{1,0} convolution(%b, %c), dim_labels=bf_io->bf
  ROOT %all-gather.8 = f32[16,8]{1,0} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="2"}
}

%spread_done (a: f32[4,8]) -> f32[16,8] {
  ROOT %all-gather.9 = f32[16,8]{1,0} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="2"}
}

%body (state: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %value = f32[16,8]{1,0} get-tuple-element(%state), index=1
  %permute-start = (f32[16,8]{1,0}, f32[16,8]{1,0}, u32[], u32[]) collective-permute-start(%value), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %kernel = f32[16,8]{1,0} custom-call(%value), custom_call_target="tpu_custom_call"
  %permute-done = f32[16,8]{1,0} collective-permute-done(%permute-start)
  ROOT %next = (s32[], f32[16,8]{1,0}) tuple(%count, %permute-done)
}

ENTRY %main (p0: f32[4,8], p1: f32[16,8]) -> f32[16,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[16,8]{1,0} parameter(1)
  %plain = f32[16,8]{1,0} all-gather(%p0), replica_groups={{0,1,2,3}}, dimensions={0}
  %all-gather-start.1 = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%p0), replica_groups={{0,1,2,3}}
  %beside = f32[16,16]{1,0} fusion(%p1), kind=kOutput, calls=%product
  %all-gather-done.1 = f32[16,8]{1,0} all-gather-done(%all-gather-start.1)
  %all-gather-start.2 = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%p0), replica_groups={{0,1,2,3}}
  %light = f32[16,8]{1,0} fusion(%p1), kind=kLoop, calls=%elementwise
  %all-gather-done.2 = f32[16,8]{1,0} all-gather-done((f32[4,8]{1,0}, f32[16,8]{1,0}) %all-gather-start.2)
  %behind = f32[16,16]{1,0} fusion(%p1), kind=kOutput, calls=%product
  %loop = (s32[], f32[16,8]{1,0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[16,8]{1,0} add(%all-gather-done.1, %all-gather-done.2)
}
"""
STARTS = """\
  %wrapped = ((f32[4,8]{1,0}), f32[16,8]{1,0}, u32[]) async-start(%p0), calls=%gather
  %dot.9 = f32[16,16]{1,0} dot(%p1, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %updated = ((f32[4,8]{1,0}), f32[16,8]{1,0}, u32[]) async-update(%wrapped), calls=%gather
  %finished = f32[16,8]{1,0} async-done(%updated), calls=%gather
"""
CHAIN = """\
  %spread = (f32[16,8]{1,0}, u32[]) fusion(%p0), kind=kCustom, calls=%spread_start
  %middle = (f32[16,8]{1,0}, u32[]) fusion(%p0), kind=kCustom, calls=%spread_middle
  %end = f32[16,8]{1,0} fusion(%p0), kind=kCustom, calls=%spread_done
"""


def gathers(text=PAIRS):
    return hlo.collectives(text, 4)["all-gather"]


def with_(lines):
    return PAIRS.replace("  %behind =", f"{lines}  %behind =")


def test_a_product_between_start_and_end_is_overlap_and_elementwise_work_or_a_product_behind_is_not():
    found = gathers()
    assert (found.count, found.asynchronous, found.overlapped) == (3, 2, 1)
    assert (found.sent_bytes, found.overlapped_bytes) == (3 * SIZE * 3 // 4, SIZE * 3 // 4)


def test_a_pair_whose_product_is_moved_behind_it_overlaps_no_more():
    lines = PAIRS.splitlines(keepends=True)
    beside = next(line for line in lines if line.startswith("  %beside"))
    moved = "".join(line for line in lines if line != beside).replace("  %behind", f"{beside}  %behind")
    assert gathers(moved)[:6] == gathers()[:6] and gathers(moved).overlapped == 0


def test_a_loops_pair_counts_once_a_round_and_a_kernel_is_a_product():
    found = hlo.collectives(PAIRS, 4)["collective-permute"]
    assert (found.count, found.asynchronous, found.overlapped, found.overlapped_bytes) == (5, 5, 5, 5 * SIZE)
    other = PAIRS.replace("tpu_custom_call", "AllocateBuffer")
    assert hlo.collectives(other, 4)["collective-permute"].overlapped == 0


def test_a_start_that_ends_in_another_computation_is_asynchronous_and_not_overlapped():
    text = PAIRS.replace("  %permute-done = f32[16,8]{1,0} collective-permute-done(%permute-start)\n", "")
    found = hlo.collectives(text, 4)["collective-permute"]
    assert (found.asynchronous, found.overlapped) == (5, 0)


@pytest.mark.parametrize("lines", [STARTS, CHAIN], ids=["async-start", "chain of fusions"])
def test_wrapped_starts_and_chains_of_fusions_are_followed_to_their_end(lines):
    plain, found = gathers(), gathers(with_(lines))
    assert (found.count, found.asynchronous, found.overlapped) == (4, 3, 2)
    assert found.overlapped_bytes - plain.overlapped_bytes == SIZE * 3 // 4
    without = with_(lines.replace(" dot(", " negate(")).replace(" convolution(", " negate(")
    assert (gathers(without).asynchronous, gathers(without).overlapped) == (3, 1)


def test_the_share_is_of_all_bytes_sent_and_none_of_nothing():
    collectives = hlo.collectives(PAIRS, 4)
    share, unit, facts = tpu_train.overlapped(collectives)
    assert (facts["count"], facts["asynchronous"], facts["overlapped"]) == (8, 7, 6) and unit == "ratio"
    assert share == pytest.approx((SIZE * 3 / 4 + 5 * SIZE) / (3 * SIZE * 3 / 4 + 5 * SIZE))
    assert tpu_train.overlapped({})[0] == 0


# What the TPU's compiler schedules

NUM_LAYERS, KERNELS = 2, 7  # of a layer: query, key, value, output, gate, up, down
CHANGES = (
    "model.vocab_size=512", "model.d_model=256", "model.d_ff=1024", f"model.num_layers={NUM_LAYERS}",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=64", "model.max_seq_len=512", "data.seq_len=512",
    "batch_size=8", "implementation=dense", "scan_layers=false", "step.remat.policy=none",
    "model.tie_embeddings=false", "parallel.mesh.fsdp=4", "parallel.mesh.model=1",
)  # fmt: skip
FLAG = "--xla_tpu_enable_async_collective_fusion"


def compiled(value, output):
    """Records of a small decoder's step for four chips, by metric; value: of FLAG."""
    command = [sys.executable, "-m", "jaxbench.training.tpu_train", "--topology=v5e:2x2", f"--output={output}"]
    command += [f"--set={change}" for change in CHANGES]
    environment = os.environ | tpu_compile.ENVIRONMENT
    environment |= {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false", "LIBTPU_INIT_ARGS": f"{FLAG}={value}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "overlap in the schedule: " in done.stdout
    return {record["metric"]: record for record in map(json.loads, output.read_text().splitlines())}


@pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")
def test_a_tpu_gathers_the_layers_weights_beside_products_unless_told_not_to(tmp_path):
    """ZeRO 3, two layers; async collective fusion is the default, and the control arm is without it."""
    beside, apart = (compiled(value, tmp_path / f"{value}.jsonl") for value in ("true", "false"))
    gathers = beside["tpu_collective_bytes"]["detail"]["kinds"]["all-gather"]
    assert NUM_LAYERS * KERNELS <= gathers["count"]
    assert 0 < gathers["overlapped"] <= gathers["asynchronous"] <= gathers["count"]
    share = beside["tpu_overlapped_share"]
    assert share["value"] == pytest.approx(gathers["overlapped_bytes"] / beside["tpu_collective_bytes"]["value"])
    assert share["value"] > 0.1
    assert apart["tpu_overlapped_share"]["value"] == apart["tpu_overlapped_share"]["detail"]["asynchronous"] == 0
    assert apart["tpu_collective_bytes"]["value"] == beside["tpu_collective_bytes"]["value"]
