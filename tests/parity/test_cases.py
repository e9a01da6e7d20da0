"""The case table: what it covers, how it answers a wrong id, and the data of its cases."""

import numpy as np
import pytest

from jaxbench import prompts
from jaxbench.parity import cases

TINY = [case for case in cases.CASES if case.config is not None and case.data is None and case.exact is None]


def test_ids_are_unique_and_name_their_workload():
    ids = [case.id for case in cases.CASES]
    assert len(set(ids)) == len(ids)
    workloads = {case.id: "transformer" if case in TINY else case.module.partition(".")[0] for case in cases.CASES}
    workloads |= {case.id: "oracle" for case in cases.CASES if (case.exact or "").startswith("oracles.")}
    assert all(name.startswith(f"{workload}/") for name, workload in workloads.items())


def test_the_table_covers_every_family_and_variant():
    configs = [case.config for case in TINY]
    assert {c.norm for c in configs} == {"rmsnorm", "layernorm"}
    assert {c.position for c in configs} == {"rotary", "learned"}
    assert {c.activation for c in configs} == {"swiglu", "geglu", "gelu"}
    assert {c.tie_embeddings for c in configs} == {c.use_bias for c in configs} == {True, False}
    assert {c.num_heads // c.num_kv_heads for c in configs} == {1, 2, 4}
    assert {c.rope_scaling and c.rope_scaling.kind for c in configs} == {None, "linear", "llama3", "yarn"}
    assert any(c.sliding_window for c in configs) and {c.qk_norm for c in configs} == {True, False}
    parts = ("qkv_bias", "post_norms", "attention_softcap", "logit_softcap", "global_every", "local_rope_theta")
    assert all(any(getattr(c, part) for c in configs) for part in parts)
    assert {case.options.get("implementation", "dense") for case in TINY} == {"dense", "blocked"}
    assert any(case.is_scanned for case in TINY) and any(case.packed for case in TINY)
    assert all(c.dropout > 0 for c in configs)  # so that twins' masks are compared in every case


def test_the_table_covers_what_short_rows_and_single_tokens_do_not_show():
    long = [case for case in TINY if len(prompts.query_parts(case.length)) > 1]
    assert any(case.config.sliding_window and case.config.global_every for case in long)
    assert any(case.batch > case.step.accumulation > 1 for case in TINY)  # else every micro-batch is one row
    chunked = [case for case in TINY if case.chunk > 1]
    assert any(case.config.sliding_window for case in chunked) and any(case.config.layer_kind for case in chunked)


def test_calls_behind_the_prefill_fill_every_slot_once():
    case = cases.Case("tiny", None, length=9, prompt=4, chunk=3)
    assert case.cached_calls() == [slice(4, 7), slice(7, 8), slice(8, 9)]
    assert cases.Case("tiny", None, length=6, prompt=4).cached_calls() == [slice(4, 5), slice(5, 6)]


def test_a_case_of_a_kernel_has_it_in_narrow_types_alone_and_only_where_the_device_is():
    kernels = [case for case in TINY if case.kernel]
    assert kernels and all(case.device == "gpu" for case in kernels)
    assert all("implementation" not in case.options_in("float64") for case in kernels)
    assert {case.options_in("bfloat16")["implementation"] for case in kernels} == {"fused"}
    assert {case.packed for case in kernels} == {True, False} and any(case.config.sliding_window for case in kernels)


def test_the_default_model_is_a_case():
    assert cases.find("transformer/smollm2").config is None


def test_an_unknown_id_is_answered_with_the_nearest_ones():
    with pytest.raises(
        ValueError, match=r"--case='transformer/lama-grouped' is not a .* nearest: transformer/llama-grou"
    ):
        cases.find("transformer/lama-grouped")


def test_an_id_like_nothing_is_answered_with_the_whole_list():
    with pytest.raises(ValueError, match="transformer/smollm2"):
        cases.find("%%%")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.id)
def test_data_has_padding_packing_and_targets_that_follow_the_tokens(case):
    data = cases.arrays(case, case.config)
    assert data.tokens.shape == (case.batch, case.length) and data.tokens.max() < case.config.vocab_size
    np.testing.assert_array_equal(data.tokens[:, 1:], data.targets[:, :-1])
    assert (data.positions[0] >= 0).all() and (data.positions[1, : case.length // 4] == -1).all()
    assert not data.mask[data.positions < 0].any() and data.mask.sum() > case.length // 2
    assert (data.segments is not None) == case.packed
    if case.packed:
        assert data.positions[0, case.length // 2] == 0 and data.segments[0, case.length // 2] == 1


def test_data_is_fixed_by_case_and_step():
    case = cases.find("transformer/gpt2")
    first, again, other = (cases.arrays(case, case.config, step=step) for step in (3, 3, 4))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()


def test_no_two_parameters_of_a_case_are_equal_and_none_is_a_default():
    config, params = cases.load(cases.find("transformer/gpt2"))
    assert not any((value == value.flat[0]).all() for value in params.values())
    for shape in {value.shape for value in params.values()}:
        same = [value for value in params.values() if value.shape == shape]
        assert len({value.tobytes() for value in same}) == len(same)
    assert config.norm == "layernorm"
