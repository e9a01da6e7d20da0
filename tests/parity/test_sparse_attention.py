"""Parity cases of block-sparse attention: equal to a dense mask on both backends, and gates that can fail."""

import pytest

from jaxbench.parity import cases, injection, run, sparse_attention
from torch_ref import sparse_attention as torch_sparse_attention

EXACT = [case.id for case in cases.CASES if case.exact == "sparse_attention"]


@pytest.mark.parametrize("case_id", EXACT)
def test_jax_and_torch_equal_a_dense_mask(case_id):
    found = run.run(cases.find(case_id))
    assert found["passed"] and found["worst"] <= sparse_attention.TOLERANCE
    assert [gate["what"].partition(":")[0] for gate in found["gates"]] == ["flax", "torch"]


def test_the_cases_cover_every_rule_of_a_pattern():
    patterns = [cases.find(case_id).config for case_id in EXACT]
    assert any(p.local > 1 for p in patterns) and any(p.first for p in patterns) and any(p.stride for p in patterns)
    assert all(cases.find(case_id).length % p.block_size for case_id, p in zip(EXACT, patterns, strict=True))


def test_a_backend_that_masks_the_wrong_block_fails_its_gate_alone():
    case = cases.find(EXACT[0])
    wrong = lambda original, spans, rows, columns, size: original(spans, rows, rows, size)
    with injection.replaced(torch_sparse_attention, "_pair_mask", wrong):
        gates = run.run(case)["gates"]
    assert [gate["passed"] for gate in gates] == [True, False] and gates[1]["error"] > 1e-3


def test_the_gate_passes_queries_moved_by_1e_14_and_refuses_1e_9():
    case = cases.find(EXACT[0])
    wanted = sparse_attention.inputs(case.seed, length=case.length)
    for scale, is_equal in ((1 + 1e-14, True), (1 + 1e-9, False)):
        moved = wanted._replace(query=wanted.query * scale)
        with injection.replaced(sparse_attention, "in_jax", lambda original, pattern, given, moved=moved: original(pattern, moved)):  # fmt: skip  # noqa: E501
            assert run.run(case)["passed"] == is_equal
