"""Programs compiled for a GPU that is not attached, and what is read from them."""

import os
import re
import subprocess
import sys

import jax
import pytest

from jaxbench import config
from jaxbench.gpu import ahead, kernels
from jaxbench.measure import hlo
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

LAYERS, WIDTH, LENGTH, ROWS = 2, 256, 128, 4
TINY = (
    "model.vocab_size=512", f"model.d_model={WIDTH}", "model.d_ff=512", f"model.num_layers={LAYERS}",
    "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=64", f"model.max_seq_len={LENGTH}",
    f"data.seq_len={LENGTH}", f"batch_size={ROWS}", "step.accumulation=2",
)  # fmt: skip
WIDE = (
    "model.vocab_size=50304", "model.d_model=768", "model.d_ff=3072", "model.num_layers=1", "model.num_heads=12",
    "model.num_kv_heads=12", "model.max_seq_len=2048", "data.seq_len=2048", "batch_size=8", "step.accumulation=1",
)  # fmt: skip
KERNEL_BYTES = 2 * WIDTH * WIDTH  # of the smallest one, in bfloat16
needs_plugin = pytest.mark.skipif(bool(ahead.unavailable()), reason=ahead.unavailable() or "-")

# From XLA's output for an H200, metadata shortened: sixteen rounds that each write a row of an array in place, and read
# a row of another and all of the first.
LOOP = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }

%fused_tanh (param_0.9: f32[16,256], param_1.11: f32[16,256], param_2.6: s32[]) -> f32[256] {
  %param_1.11 = f32[16,256]{1,0} parameter(1), metadata={scheduling_name="param_1.11"}
  %param_2.6 = s32[] parameter(2), metadata={scheduling_name="param_2.6"}
  %constant_22_1 = s32[] constant(0)
  %dynamic_slice.4.1 = f32[1,256]{1,0} dynamic-slice(%param_1.11, %param_2.6, %constant_22_1)
  %bitcast.1.3 = f32[256]{0} bitcast(%dynamic_slice.4.1)
  %param_0.9 = f32[16,256]{1,0} parameter(0), metadata={scheduling_name="param_0.9"}
  %constant_20_1 = f32[] constant(-inf)
  %reduce_max.6.1 = f32[256]{0} reduce(%param_0.9, %constant_20_1), dimensions={0}, to_apply=%region_1.1
  %mul.4.3 = f32[256]{0} multiply(%bitcast.1.3, %reduce_max.6.1)
  ROOT %tanh.4.1 = f32[256]{0} tanh(%mul.4.3)
}

%fused_dynamic_update_slice.clone (param_0.11: f32[16,256], param_1.14: f32[256], param_2.8: s32[]) -> f32[16,256] {
  %param_0.11 = f32[16,256]{1,0} parameter(0), metadata={scheduling_name="param_0.11"}
  %param_1.14 = f32[256]{0} parameter(1), metadata={scheduling_name="param_1.14"}
  %bitcast.4 = f32[1,256]{1,0} bitcast(%param_1.14)
  %param_2.8 = s32[] parameter(2), metadata={scheduling_name="param_2.8"}
  %constant_22_2_1 = s32[] constant(0)
  ROOT %dynamic_update_slice.4.2 = f32[16,256]{1,0} dynamic-update-slice(%param_0.11, %bitcast.4, %param_2.8)
}

%wrapped_convert_computation (param_0.2: f32[256]) -> bf16[256] {
  %param_0.2 = f32[256]{0} parameter(0)
  ROOT %convert.1 = bf16[256]{0} convert(%param_0.2)
}

%region_0.2.clone (arg_tuple.7: (s32[], f32[16,256], f32[256], f32[16,256])) -> (s32[], f32[16,256], f32[256]) {
  %arg_tuple.7 = (s32[], f32[16,256]{1,0}, f32[256]{0}, f32[16,256]{1,0}) parameter(0)
  %get-tuple-element.69 = s32[] get-tuple-element(%arg_tuple.7), index=0
  %get-tuple-element.70 = f32[16,256]{1,0} get-tuple-element(%arg_tuple.7), index=1
  %get-tuple-element.71 = f32[256]{0} get-tuple-element(%arg_tuple.7), index=2
  %get-tuple-element.76 = f32[16,256]{1,0} get-tuple-element(%arg_tuple.7), index=3
  %fusion-start = ((f32[16,256]{1,0}, f32[256]{0}, s32[]), f32[16,256]{1,0}, u32[]) fusion-start(%get-tuple-element.70, %get-tuple-element.71, %get-tuple-element.69), kind=kLoop, calls=%fused_dynamic_update_slice.clone, metadata={op_name="while/body/update"}
  %fusion-done = f32[16,256]{1,0} fusion-done(%fusion-start), metadata={op_name="while/body/update"}
  %loop_tanh_fusion.3.clone = f32[256]{0} fusion(%fusion-done, %get-tuple-element.76, %get-tuple-element.69), kind=kLoop, calls=%fused_tanh, metadata={op_name="while/body/tanh"}
  %wrapped_convert.1 = bf16[256]{0} fusion(%loop_tanh_fusion.3.clone), kind=kLoop, calls=%wrapped_convert_computation
  %cudnn.4 = (bf16[256]{0}, u8[64]{0}) custom-call(%wrapped_convert.1), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %tuple.14 = (s32[], f32[16,256]{1,0}, f32[256]{0}) tuple(%get-tuple-element.69, %fusion-done, %loop_tanh_fusion.3.clone)
}

%region_2.3.clone (arg_tuple.6: (s32[], f32[16,256], f32[256], f32[16,256])) -> pred[] {
  %arg_tuple.6 = (s32[], f32[16,256]{1,0}, f32[256]{0}, f32[16,256]{1,0}) parameter(0)
  %get-tuple-element.55.0 = s32[] get-tuple-element(%arg_tuple.6), index=0
  %constant_19_1 = s32[] constant(16)
  ROOT %lt.9.1 = pred[] compare(%get-tuple-element.55.0, %constant_19_1), direction=LT
}

ENTRY %main.4 (w.1: f32[16,256], cache.1: f32[16,256], x.1: f32[256]) -> (f32[16,256], f32[256]) {
  %x.1 = f32[256]{0} parameter(2), metadata={op_name="x"}
  %copy.5 = f32[256]{0} copy(%x.1)
  %w.1 = f32[16,256]{1,0} parameter(0), metadata={op_name="w"}
  %cache.1 = f32[16,256]{1,0} parameter(1), metadata={op_name="cache"}
  %constant.1 = s32[] constant(0)
  %tuple = (s32[], f32[16,256]{1,0}, f32[256]{0}, f32[16,256]{1,0}) tuple(%constant.1, %cache.1, %copy.5, %w.1)
  %while.1 = (s32[], f32[16,256]{1,0}, f32[256]{0}, f32[16,256]{1,0}) while(%tuple), condition=%region_2.3.clone, body=%region_0.2.clone, backend_config={"known_trip_count":{"n":"16"}}
  %get-tuple-element.5 = f32[16,256]{1,0} get-tuple-element(%while.1), index=1
  %get-tuple-element.6 = f32[256]{0} get-tuple-element(%while.1), index=2
  ROOT %tuple.3 = (f32[16,256]{1,0}, f32[256]{0}) tuple(%get-tuple-element.5, %get-tuple-element.6)
}
"""  # noqa: E501
ROW, WHOLE = 4 * 256, 4 * 16 * 256  # bytes
CALL = """\
%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %negate.2 = f32[8]{0} negate(%p)
}

ENTRY %main (x: f32[8], is_on: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %is_on = s32[] parameter(1)
  %call = f32[8]{0} call(%x), to_apply=%inner
  ROOT %cond = f32[8]{0} conditional(%is_on, %call, %call), branch_computations={%inner, %other}
}

%other (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}
"""


# Reading


def test_what_a_loop_runs_comes_first_with_its_rounds_and_its_kernels():
    found = kernels.read(LOOP)
    assert [(each.name, each.role, each.runs, each.kernels) for each in found] == [
        ("region_0.2.clone", "body", 16, 4),
        ("main.4", "entry", 1, 1),
        ("region_2.3.clone", "condition", 16, 1),
    ]


def test_a_kernel_is_named_by_its_fusion_or_by_the_library_it_calls():
    kinds = kernels.read(LOOP)[0].kinds
    assert kinds == {"fusion-start": 1, "loop_tanh_fusion": 1, "wrapped_convert": 1, "__cudnn$fmhaSoftmax": 1}


def test_a_row_read_or_written_in_place_counts_as_a_row():
    groups = {group.kind: group for group in kernels.read(LOOP)[0].groups}
    update, tanh = groups["fusion-start"], groups["loop_tanh_fusion"]
    assert (update.bytes_read, update.bytes_written) == (ROW + 4, ROW)  # the row and its number; the row
    assert (tanh.bytes_read, tanh.bytes_written) == (WHOLE + ROW + 4, ROW)
    assert tanh.op_name == "while/body/tanh" and tanh.largest == "f32[256]"


def test_a_conversion_reads_all_that_it_converts_and_a_workspace_is_not_written():
    groups = {group.kind: group for group in kernels.read(LOOP)[0].groups}
    assert groups["wrapped_convert"][3:5] == (ROW, ROW // 2)
    assert groups["__cudnn$fmhaSoftmax"][3:5] == (ROW // 2, ROW // 2)


def test_a_computation_sums_its_groups_and_the_largest_group_stands_first():
    body = kernels.read(LOOP)[0]
    assert body.bytes_read == sum(group.bytes_read for group in body.groups)
    assert body.bytes_written == sum(group.bytes_written for group in body.groups)
    assert body.groups[0].kind == "loop_tanh_fusion"


def test_a_call_counts_as_its_callers_own_and_branches_stand_by_themselves():
    found = {each.name: each for each in kernels.read(CALL)}
    assert found["main"].kinds == {"negate": 1} and found["main"].bytes_read == 32
    assert {name: each.role for name, each in found.items()} == {"main": "entry", "inner": "branch", "other": "branch"}
    assert found["other"].kernels == 0 and found["inner"].runs is None


def test_a_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation in a text of 5 characters"):
        kernels.read("hello")


def test_the_tables_name_every_computation_and_every_group():
    overview, groups = kernels.tables(kernels.read(LOOP), ahead.TARGETS["h200"].memory_bytes_per_s)
    assert (overview.row_count, groups.row_count) == (3, 4)


# Targets


def test_an_unknown_target_names_the_known_ones():
    with pytest.raises(ValueError, match="target='a100' is unknown; wanted one of h100, h200"):
        ahead.device("a100")


def test_without_the_plugin_the_error_says_what_brings_it(monkeypatch):
    monkeypatch.setattr(ahead, "PLUGINS", ("xla_cuda_of_no_version",))
    with pytest.raises(ValueError, match=r"CUDA plugin is not installed; `pip install -e '\.\[gpu\]'`.*for h200"):
        ahead.device("h200")


def test_a_plugin_that_did_not_start_is_told_with_the_way_out(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    monkeypatch.setattr(ahead, "unavailable", lambda: "")
    with pytest.raises(ValueError, match="did not start for h100; where there is no GPU, set JAX_PLATFORMS=cpu"):
        ahead.device("h100")


def test_a_configuration_with_a_mesh_is_refused():
    settings = config.load(ROOT / "configs/lm/tpu_1b.yaml", (), TrainConfig)
    with pytest.raises(ValueError, match="parallel.mesh=.*wanted null: one GPU"):
        ahead.train_program(settings, "h200")


# Programs, each compiled in a process of its own: this one has a compile cache, which cannot hold them


PROGRAM = """
import sys
from jaxbench import config, sample
from jaxbench.gpu import ahead, kernels
from jaxbench.training.train_config import TrainConfig
settings = config.load({path!r}, {changes!r}, TrainConfig)
if {kind!r} == "train":
    made = ahead.train_program(settings, "h200")
else:
    sample.TRANSPOSES_ON = {turned!r}
    weights = {kind!r} if {kind!r} != "decode" else "float"
    sizes = "bfloat16", 1, 16, 32, "h200", weights, "xla", {devices}
    made = ahead.generation_programs(settings.decoder(None), *sizes).decode
print(made.memory_analysis().alias_size_in_bytes)
print(made.as_text())
"""


def compiled(
    kind: str, turned: tuple[str, ...] = ("gpu",), devices: int = 1, changes: tuple[str, ...] = ()
) -> tuple[int, list[kernels.Computation]]:
    """Compile a tiny program; return the bytes of arguments that it writes its results over, and what it runs."""
    path = str(ROOT / "configs/lm/gpt2_124m.yaml")
    program = PROGRAM.format(path=path, changes=TINY + changes, kind=kind, turned=turned, devices=devices)
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    alias, _, text = done.stdout.partition("\n")
    return int(alias), kernels.read(text)


@pytest.fixture(scope="module")
def train():
    return compiled("train")


@pytest.fixture(scope="module")
def decode():
    return compiled("decode")


def body(found: list[kernels.Computation]) -> kernels.Computation:
    """Return the largest loop's body."""
    return next(each for each in found if each.role == "body")


@needs_plugin
def test_a_train_step_calls_cudnn_attention_once_a_layer_forward_and_backward(train):
    kinds = body(train[1]).kinds
    assert (kinds["__cudnn$fmhaSoftmax"], kinds["__cudnn$fmhaSoftmaxBackward"]) == (LAYERS, LAYERS)


@needs_plugin
def test_a_train_step_runs_its_micro_batches_in_a_loop_of_known_length(train):
    assert body(train[1]).runs == 2


@needs_plugin
def test_a_train_step_writes_its_state_over_the_one_it_was_given(train):
    size = LAYERS * WIDTH * (4 * WIDTH + 2 * 512)
    assert train[0] > 3 * 4 * size  # parameters and two moments in float32


@pytest.fixture(scope="module")
def wide_train():
    """Return what a step of one layer of GPT-2's 124M shape runs: the compiler fuses by size."""
    return compiled("train", changes=WIDE)[1][0]


@needs_plugin
def test_a_train_step_writes_no_activation_in_float32(wide_train):
    size = 4 * 8 * 2048 * 768
    found = [each for each in wide_train.groups if re.search(r"f32\[(8,2048|16384),(768|3072)\]", each.largest)]
    assert [each for each in found if each.bytes_written >= size] == []


@needs_plugin
def test_a_train_step_reads_its_logits_once_for_the_loss(wide_train):
    logits = 2 * 8 * 2048 * 50304
    forward = [each for each in wide_train.groups if each.kind == "input_reduce_fusion" and each.bytes_read > logits]
    assert sum(each.bytes_read for each in forward) < 1.1 * logits, forward


@needs_plugin
def test_a_float8_step_moves_less_once_magnitudes_have_been_seen():
    found = compiled("train", changes=(*WIDE, "step.precision=float8"))[1]
    seen, first = sorted((each.bytes_read, each.kernels) for each in found if each.role == "branch")
    assert seen[0] < first[0] and seen[1] < first[1]


@needs_plugin
def test_a_decode_step_of_one_row_has_no_pad_kernel(decode):
    assert [kind for kind in body(decode[1]).kinds if "pad" in kind] == []


@needs_plugin
def test_a_decode_step_copies_no_whole_weight(decode):
    assert [group for group in body(decode[1]).groups if group.bytes_written >= KERNEL_BYTES] == []


@needs_plugin
def test_a_decode_program_updates_its_cache_in_place(decode):
    assert decode[0] > LAYERS * 2 * 64 * WIDTH * 2  # keys and values of 64 slots, bfloat16


@needs_plugin
def test_the_same_look_finds_weights_written_anew_where_kernels_are_not_turned():
    _, found = compiled("decode", turned=())
    assert [group for group in body(found).groups if group.bytes_written >= KERNEL_BYTES]


@needs_plugin
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_decode_step_of_one_row_reads_integers_and_writes_no_floats_of_them(weights):
    floats = 4 * LAYERS * WIDTH * (4 * WIDTH + 2 * 512)
    assert body(compiled(weights)[1]).bytes_written < floats / 3  # as products they are written whole, and more


@needs_plugin
@pytest.mark.parametrize("weights", ["decode", "int8", "int4"])
def test_a_decode_step_over_two_gpus_reads_half_of_the_weights_and_moves_none(weights, decode):
    if weights == "int8" and jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10 writes half a matrix of this size as floats, and none of a decoder of 1 B parameters")
    found = body(compiled(weights, devices=2)[1])
    alone = body(decode[1] if weights == "decode" else compiled(weights)[1])
    assert found.bytes_read < 0.8 * alone.bytes_read  # tiny: activations and the cache are a part of it
    sums = {kind: count for kind, count in found.kinds.items() if kind.startswith("all-") and "done" not in kind}
    # Two a layer, one for the logits, two for the first norm's mean and variance; a token's embedding is gathered.
    assert sum(count for kind, count in sums.items() if kind.startswith("all-reduce")) == 2 * LAYERS + 3
    assert sum(count for kind, count in sums.items() if kind.startswith("all-gather")) == 1
    assert {kind.split("-start")[0] for kind in sums} == {"all-reduce", "all-gather"}
    assert all(group.bytes_written < KERNEL_BYTES for group in found.groups if group.kind.startswith("all-"))


@needs_plugin
def test_the_command_prints_its_tables_and_keeps_the_text(tmp_path):
    command = [sys.executable, "-m", "jaxbench.gpu.ahead", "--program=prefill", "--prompt_tokens=16", "--target=h100"]
    command += [f"--set={change}" for change in TINY] + [f"--output={tmp_path / 'prefill.hlo'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "computations, one run of each" in done.stdout and "memory, GB: argument" in done.stdout
    assert hlo.collectives((tmp_path / "prefill.hlo").read_text(), 1) == {}
