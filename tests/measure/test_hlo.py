"""Collectives read from HLO text, against sizes by hand."""

from __future__ import annotations

import pytest

from jaxbench.measure import hlo

GOLDEN = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.3 (input: f32[64,8]) -> f32[16,8] {
  %input = f32[64,8]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,8]{1,0:T(8,128)} all-reduce(%input), channel_id=5, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[16,8]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %p), dynamic_slice_sizes={16,8}
}

%async_collective_fusion.7 (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.9 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%a), channel_id=9, replica_groups=mesh['axis_0'=4] \
{'axis_0'}, dimensions={0}, frontend_attributes={chain_id="2"}
}

%fused_computation.8 (a: bf16[4,8]) -> bf16[16,8] {
  %a.1 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.10 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%a.1), channel_id=9, replica_groups=mesh['axis_0'=4] \
{'axis_0'}, dimensions={0}, frontend_attributes={chain_id="2"}
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %kernel = f32[8]{0} custom-call(%state), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(run)/pallas_call"}
  %value = f32[8]{0} get-tuple-element(%state), index=1
  %permute = f32[8]{0} collective-permute(%value), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %next = (s32[], f32[8]{0}) tuple(%count, %permute)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %state.1 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count.1, %limit), direction=LT
}

ENTRY %main (p0: f32[32,8], p1: bf16[4,8]) -> f32[32,8] {
  %p0 = f32[32,8]{1,0} parameter(0)
  %p1 = bf16[4,8]{1,0} parameter(1)
  %all-reduce-start = f32[32,8]{1,0} all-reduce-start(%p0), replica_groups=[2,2]<=[4], to_apply=%add
  %all-reduce-done = f32[32,8]{1,0} all-reduce-done(%all-reduce-start)
  %all-gather-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p1), replica_groups={{0,1,2,3}}
  %all-gather-done = bf16[16,8]{1,0} all-gather-done(%all-gather-start)
  %first = bf16[16,8]{1,0} fusion(%p1), kind=kCustom, calls=%async_collective_fusion.7
  %second = bf16[16,8]{1,0} fusion(%p1), kind=kCustom, calls=%fused_computation.8
  %scattered = f32[16,8]{1,0} fusion(%p2), kind=kCustom, calls=%all-reduce-scatter.3
  %reduce-scatter = f32[8,8]{1,0} reduce-scatter(%p0), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %all-to-all = (f32[8]{0}, f32[8]{0}) all-to-all(%q, %r), replica_groups={{0,1},{2,3}}
  %lonely = f32[99]{0} all-reduce(%s), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[32,8]{1,0} add(%all-reduce-done, %all-reduce-done)
}
"""


@pytest.fixture(scope="module")
def found():
    return hlo.collectives(GOLDEN, 4)


def test_only_kinds_that_occur_are_returned_in_order(found):
    assert list(found) == ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


def test_asynchronous_all_reduce_counts_once_and_groups_of_one_never(found):
    size = 32 * 8 * 4
    assert found["all-reduce"][:5] == ("all-reduce", 1, size, size, 0)  # two chips: 2 (n - 1) / n = 1


def test_a_gather_spread_over_fusions_counts_once_beside_the_plain_one(found):
    size = 16 * 8 * 2
    assert found["all-gather"][:5] == ("all-gather", 2, 2 * size, 2 * size * 3 // 4, 0)


def test_fused_all_reduce_scatter_is_a_reduce_scatter(found):
    assert found["reduce-scatter"].count == 2
    assert found["reduce-scatter"].result_bytes == 16 * 8 * 4 + 8 * 8 * 4
    assert found["reduce-scatter"].sent_bytes == 3 * (16 * 8 * 4 + 8 * 8 * 4)  # 3/4 of what is reduced


def test_tuples_of_all_to_all_are_summed(found):
    assert found["all-to-all"][1:4] == (1, 64, 32)


def test_a_loop_multiplies_by_its_trip_count(found):
    assert found["collective-permute"][:5] == ("collective-permute", 6, 6 * 32, 6 * 32, 0)


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    text = GOLDEN.replace("direction=LT", "direction=NE")
    assert hlo.collectives(text, 4)["collective-permute"][:5] == ("collective-permute", 1, 32, 32, 1)
    known = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
    assert hlo.collectives(known, 4)["collective-permute"].count == 9
    assert "collective-permute" not in hlo.collectives(known.replace('"n":"9"', '"n":"0"'), 4)


def test_shapes_in_bytes():
    shape = "(f32[2,3]{1,0:T(8,128)}, bf16[4]{0}, pred[8], s4[4], f8e4m3fn[5], s32[], f8e4m3b11fnuz[7])"
    assert hlo.shape_bytes(shape) == [24, 8, 8, 2, 5, 4, 7]


def test_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation in a text of 9 characters"):
        hlo.collectives("HloModule", 4)


def test_a_real_program_of_eight_devices_reduces_what_it_must():
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxbench import sharding

    mesh = sharding.make_mesh({"data": 8}, jax.devices())
    split = NamedSharding(mesh, P(None, "data"))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data", None)))
    compiled = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P())).lower(x, w).compile()
    assert hlo.collectives(compiled.as_text(), 8) == {
        "all-reduce": hlo.Collective("all-reduce", 1, 16 * 32 * 4, int(2 * 7 / 8 * 16 * 32 * 4), 0)
    }
