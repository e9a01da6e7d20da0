"""FLOPs and bytes of instructions against counts by hand, and events as slices."""

from __future__ import annotations

import pytest

from jaxbench.profiling import events, program_cost, scopes, table

TEXT = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[100,8], param_1: s32[]) -> f32[1,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,8}
  ROOT %twice = f32[1,8]{1,0} add(%cut, %cut)
}

%written (param_0: f32[100,8], param_1: f32[1,8], param_2: s32[]) -> f32[100,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = f32[1,8]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %param_2)
}

ENTRY %main (a: bf16[4,16], b: bf16[16,8], t: f32[100,8], i: s32[]) -> f32[100,8] {
  %a = bf16[4,16]{1,0} parameter(0)
  %b = bf16[16,8]{1,0} parameter(1)
  %t = f32[100,8]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %dot.1 = f32[4,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/outer/while/body/inner/dot_general"}
  %row = f32[1,8]{1,0} fusion(%t, %i), kind=kLoop, calls=%fused
  %foreign = f32[4]{0} custom-call(%a), custom_call_target="own"
  %image = f32[1,8,8,3]{3,2,1,0} constant({...})
  %kernel = f32[5,5,3,7]{3,2,1,0} constant({...})
  %conv = f32[1,8,8,7]{3,2,1,0} convolution(%image, %kernel), window={size=5x5 pad=2_2x2_2}, dim_labels=b01f_01io->b01f
  ROOT %stored = f32[100,8]{1,0} fusion(%t, %row, %i), kind=kLoop, calls=%written
}
"""  # noqa: E501


def test_costs_are_those_counted_by_hand():
    costs = program_cost.read(TEXT).costs
    assert costs["dot.1"] == (2 * 4 * 8 * 16, 2 * (4 * 16 + 16 * 8) + 4 * 4 * 8, "bf16")
    assert costs["conv"].flops == 2 * (8 * 8 * 7) * (5 * 5 * 3)


def test_a_slice_of_a_large_operand_counts_alone():
    costs = program_cost.read(TEXT).costs
    assert costs["row"] == (8, 4 * 8 + 4 + 4 * 8, "f32")
    assert costs["stored"].bytes == 4 * 8 + 4 * 8 + 4  # written in place


def test_foreign_code_has_unknown_flops():
    assert program_cost.read(TEXT).costs["foreign"] == (None, 4 * 4 + 2 * 4 * 16, "bf16")


@pytest.mark.parametrize(
    "rest, flops",
    [
        ('"own", metadata={op_name="jit(gemm)/gemm/own"}', None),  # the user's scopes are no library's product
        ('"__onednn$matmul", metadata={op_name="jit(f)/dot_general"}', None),  # it does not say what is summed
        ('"__cublas$gemm", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}', 2 * 4 * 16),
    ],
)
def test_foreign_products_are_told_by_their_target_alone(rest, flops):
    costs = program_cost.read(TEXT.replace('custom_call_target="own"', f"custom_call_target={rest}")).costs
    assert costs["foreign"].flops == flops


PARTS = """HloModule jit_h, is_scheduled=true

%reshaped (param_0: f32[100,4,2], param_1: s32[]) -> f32[8] {
  %param_0 = f32[100,4,2]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %flat = f32[100,8]{1,0} bitcast(%param_0)
  %cut = f32[1,8]{1,0} dynamic-slice(%flat, %param_1, %param_1), dynamic_slice_sizes={1,8}
  ROOT %row = f32[8]{0} bitcast(%cut)
}

%changed (param_0: f32[100,8], param_1: s32[]) -> (f32[100,8], f32[8]) {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %old = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %param_1), dynamic_slice_sizes={1,8}
  %put = f32[100,8]{1,0} dynamic-update-slice(%param_0, %old, %param_1, %param_1)
  %flat = f32[8]{0} bitcast(%old)
  ROOT %both = (f32[100,8]{1,0}, f32[8]{0}) tuple(%put, %flat)
}

%filled (param_0: f32[1,8], param_1: s32[]) -> f32[100,8] {
  %param_0 = f32[1,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = f32[] constant(0)
  %new = f32[100,8]{1,0} broadcast(%zero), dimensions={}
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%new, %param_0, %param_1, %param_1)
}

ENTRY %main (t: f32[100,4,2], u: f32[100,8], r: f32[1,8], i: s32[], j: s32[3,1], v: f32[3,8]) -> f32[100,8] {
  %t = f32[100,4,2]{2,1,0} parameter(0)
  %u = f32[100,8]{1,0} parameter(1)
  %r = f32[1,8]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %j = s32[3,1]{1,0} parameter(4)
  %v = f32[3,8]{1,0} parameter(5)
  %read = f32[8]{0} fusion(%t, %i), kind=kLoop, calls=%reshaped
  %kept = (f32[100,8]{1,0}, f32[8]{0}) fusion(%u, %i), kind=kLoop, calls=%changed
  %made = f32[100,8]{1,0} fusion(%r, %i), kind=kLoop, calls=%filled
  ROOT %spread = f32[100,8]{1,0} scatter(%made, %j, %v), update_window_dims={1}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "name, moved",
    [
        ("read", 32 + 4 + 32),  # of 3,200, through another shape
        ("kept", 32 + 4 + 32 + 32),  # a row read, written in place, and a second result
        ("made", 32 + 4 + 3200),  # what is updated is no operand, so all of it is written
        ("spread", 3 * 96 + 12),  # the rows before, the rows to add, the sums, the indices
    ],
)
def test_parts_that_are_read_or_updated_in_place_count_alone(name, moved):
    assert program_cost.read(PARTS).costs[name].bytes == moved


MANY = """HloModule jit_g, is_scheduled=true

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %zero = f32[] constant(0)
  %both = f32[64]{0} add(%a, %a)
  %sums = f32[64]{0} reduce-window(%a, %zero), window={size=16 pad=15_0}, to_apply=%add
  ROOT %sort.1 = (f32[64]{0}, f32[64]{0}, f32[64]{0}, f32[64]{0}, f32[64]{0}, /*index=5*/f32[64]{0}) sort(%a, %both, %sums, %a, %both, /*index=5*/%sums), dimensions={0}, to_apply=%less
}
"""  # noqa: E501


def test_an_instruction_of_many_results_is_read_too():
    costed = program_cost.read(MANY)
    assert costed.costs["sort.1"].bytes == 6 * 256 + 3 * 256
    assert costed.program.names["sort.1"] == "sort (" + ", ".join(["f32[64]"] * 6) + ")"
    assert costed.program.opcodes == {"add": 1, "reduce-window": 1, "sort": 1}


def test_an_operand_named_twice_is_read_once():
    assert program_cost.read(MANY).costs["both"] == (64, 2 * 256, "f32")


def test_each_result_of_a_window_reads_its_own():
    assert program_cost.read(MANY).costs["sums"].flops == 64 * 16


def test_scopes_leave_out_what_jax_puts_between():
    assert program_cost.read(TEXT).scopes["dot.1"] == ("outer", "inner")


def test_rows_add_runs_up_and_unknown_flops_stay_unknown():
    key = ("jit_f", 1)
    ran = [events.Event(key, name, "t", 0, 1000) for name in ("dot.1", "dot.1", "foreign")]
    programs = events.assign(ran, [program_cost.read(TEXT)])
    rates = table.Rates({"f32": 1e9, "bf16": 2.048e9}, 1e12)
    product, foreign = table.rows(ran, programs, rates)
    assert (product.calls, product.flops, product.seconds) == (2, 2 * 1024, 2e-6)
    assert abs(product.roofline - 0.5) < 1e-9 and product.bound == "compute"  # 0.5 us at least, took 1 us each
    assert foreign.flops is None and foreign.roofline is None and foreign.bytes == 144


def test_the_program_with_most_of_what_ran_is_taken():
    other = program_cost.read(TEXT.replace("dot.1", "dot.9"))
    ran = [events.Event(("jit_f", 7), "dot.9", "t", 0, 1)]
    assert events.assign(ran, [program_cost.read(TEXT), other])[("jit_f", 7)] is other


def test_programs_of_equal_instructions_are_told_apart_by_xlas_number():
    small, large = program_cost.read(TEXT, 4), program_cost.read(TEXT.replace("bf16[4,16]", "bf16[4,160]"), 8)
    ran = [events.Event(("jit_f", number), "dot.1", "t", 0, 1) for number in (4, 8, 9)]
    found = events.assign(ran, [small, large])
    assert found[("jit_f", 4)] is small and found[("jit_f", 8)] is large and found[("jit_f", 9)] is small
    from_cache = [each._replace(number=each.number + 40) for each in (small, large)]  # of another process
    assert list(events.assign(ran[:2], from_cache[::-1]).values()) == from_cache


def test_slices_of_one_scope_are_joined_within_a_run_and_apart_between_runs():
    key, costed = ("jit_f", 1), program_cost.read(TEXT)
    ran = [events.Event(key, "dot.1", "t", 10.0 * n, 5.0, run) for n, run in enumerate((1, 1, 2))]
    found = list(scopes.slices(ran, {key: costed}))
    assert sorted(each[2:] for each in found if each[0] == "outer") == [(0.0, 15.0), (20.0, 25.0)]
    assert len([each for each in found if each[0] == "dot.1"]) == 3
