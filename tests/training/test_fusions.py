"""What XLA fuses of a block: buffers of the full [B T D] or [B T F] size that the optimised program writes to memory.

Counted in the text of the compiled program, for this CPU and for a TPU v5e that is not attached; no times. A buffer
counts where the result of a kernel has as many elements as the residual stream, of whatever type. The chip's prefetches
(copy-start, slice-start) do not count: they copy what is there already.
"""

import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxbench import functional, initial, parameters, prng, train, transformer
from jaxbench.attention import Context
from jaxbench.config import Compute, TransformerConfig
from jaxbench.gpu import kernels
from jaxbench.measure import chips, hlo, tpu_compile
from tests.structure import ROOT

BATCH, LENGTH, WIDTH, INNER, RATE = 4, 128, 256, 1024, 0.1
CONFIG = TransformerConfig(
    vocab_size=64, d_model=WIDTH, d_ff=INNER, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
    max_seq_len=LENGTH, dropout=RATE,
)  # fmt: skip
PREFETCHES = {"copy-start", "copy-done", "slice-start", "slice-done"}
needs_libtpu = pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")


# The chains


def add_and_norm(x, mixed, scale, key):
    """Residual sum with dropout, and the norm behind it: both are read again later."""
    hidden = x + functional.dropout(mixed, RATE, functional.DropoutStream(key, 3), site=5)
    return hidden, functional.rms_norm(hidden, scale, eps=1e-6)


def swiglu(gate, up):
    return functional.activated(gate, "swiglu") * up


def gelu(up):
    return functional.activated(up, "gelu")


def bias_gelu(product, bias):
    """What follows a product with a bias: the sum and the activation."""
    return functional.activated(functional.add_bias(product, bias), "gelu")


def feed(state, x, key):
    """The block's own second half: norm, gate and up, SwiGLU, down, dropout, residual sum."""
    block = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: transformer.Block(CONFIG, Compute(dtype=str(x.dtype))))), state
    )
    return block.feed(x, Context(None, None, None, functional.DropoutStream(key, 3), None), 7)


def with_gradient(function, count):
    """Results of a function and the gradients of its first `count` arguments, for a given gradient of its results."""

    def run(grads, *args):
        results, pull = jax.vjp(lambda *first: function(*first, *args[count:]), *args[:count])
        return results, pull(grads)

    return run


def chains(dtype):
    """Functions and their arguments' shapes, by name."""
    stream, inner = (jax.ShapeDtypeStruct((BATCH, LENGTH, size), dtype) for size in (WIDTH, INNER))
    scale, key = jax.ShapeDtypeStruct((WIDTH,), dtype), jax.eval_shape(lambda: prng.key_from_seed(0))
    bias = jax.ShapeDtypeStruct((INNER,), dtype)
    state = nnx.state(nnx.eval_shape(lambda: transformer.Block(CONFIG, Compute(dtype=dtype))))
    parts = stream, stream, scale, key
    return {
        "add_and_norm": (add_and_norm, parts),
        "add_and_norm, gradient": (with_gradient(add_and_norm, 3), ((stream, stream), *parts)),
        "swiglu": (swiglu, (inner, inner)),
        "swiglu, gradient": (with_gradient(swiglu, 2), (inner, inner, inner)),
        "gelu": (gelu, (inner,)),
        "gelu, gradient": (with_gradient(gelu, 1), (inner, inner)),
        "bias_gelu": (bias_gelu, (inner, bias)),
        "bias_gelu, gradient": (with_gradient(bias_gelu, 2), (inner, inner, bias)),
        "feed": (feed, (state, stream, key)),
    }


def full_buffers(text):
    """Type and dims of every full-size buffer that the program's kernels write, in order."""
    program, entry = hlo._parse(text)
    shapes = []
    for each in kernels._inlined(program, entry):
        if each.opcode not in kernels.FREE | PREFETCHES:
            shapes += [(kind, dims) for kind, dims in hlo._SHAPE.findall(each.shape)]
    elements = [(kind, dims, math.prod(int(d) for d in dims.split(",") if d)) for kind, dims in shapes]
    return [f"{kind}[{dims}]" for kind, dims, count in elements if count >= BATCH * LENGTH * WIDTH]


def compiled(dtype, place=None, names=None, **options):
    """Full buffers of the named chains, or of all; place: a sharding on the device to compile for, None = here."""
    found = {}
    for name, (function, args) in chains(dtype).items():
        if names is None or name in names:
            placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
            program = jax.jit(function).lower(*placed).compile(compiler_options=options)
            found[name] = full_buffers(program.as_text())
    return found


def print_for_tpu():
    """Print the full buffers of every chain on a TPU v5e, by type, as JSON; in a process of its own."""
    device = tpu_compile.devices(chips.parse_topology("v5e:1x1"))[:1]
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(device, ("chip",)), jax.sharding.PartitionSpec())
    print(json.dumps({dtype: compiled(dtype, place) for dtype in ("float32", "bfloat16")}))


# On this CPU


@pytest.fixture(scope="module")
def on_cpu():
    return {dtype: compiled(dtype) for dtype in ("float32", "bfloat16")}


def test_residual_dropout_and_norm_write_nothing_but_their_two_results(on_cpu):
    """Two full buffers in float32; in bfloat16 a third, the sum in float32 in front of its rounding (XLA:CPU)."""
    stream = f"[{BATCH},{LENGTH},{WIDTH}]"
    assert on_cpu["float32"]["add_and_norm"] == [f"f32{stream}"] * 2
    assert sorted(on_cpu["bfloat16"]["add_and_norm"]) == [f"bf16{stream}"] * 2 + [f"f32{stream}"]


def test_without_xlas_fusion_every_operation_writes_a_buffer():
    """The control arm: 14 full buffers in place of 2, 7, 13 and 15 in place of 1."""
    names = ("add_and_norm", "swiglu", "gelu", "bias_gelu")
    found = compiled("float32", names=names, xla_disable_hlo_passes="fusion")
    assert [len(found[name]) for name in names] == [14, 7, 13, 15]


def test_an_activation_and_its_product_or_bias_write_their_result_alone(on_cpu):
    for kind, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
        for name in ("swiglu", "gelu", "bias_gelu"):
            assert on_cpu[dtype][name] == [f"{kind}[{BATCH},{LENGTH},{INNER}]"]


def test_a_blocks_feed_forward_half_writes_its_products_their_operands_and_its_result(on_cpu):
    """Six in float32: norm, gate, up, SwiGLU, down, sum; in bfloat16 a seventh, the norm's input in float32."""
    assert (len(on_cpu["float32"]["feed"]), len(on_cpu["bfloat16"]["feed"])) == (6, 7)


def test_gradients_write_more_than_their_results_by_this_much(on_cpu):
    """XLA:CPU's surplus with gradients: 3 of add and norm (5 in bfloat16) over 4, 1 of SwiGLU over 3, none of GELU."""
    results = {"add_and_norm, gradient": 4, "swiglu, gradient": 3, "gelu, gradient": 2, "bias_gelu, gradient": 2}
    for dtype, surplus in (("float32", [3, 1, 0, 0]), ("bfloat16", [5, 1, 0, 0])):
        assert [len(on_cpu[dtype][name]) - count for name, count in results.items()] == surplus


# On a TPU


@pytest.fixture(scope="module")
def on_tpu():
    program = "from tests.training import test_fusions; test_fusions.print_for_tpu()"
    environment = os.environ | tpu_compile.ENVIRONMENT | {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_libtpu
def test_a_tpu_writes_dropouts_mask_three_times_in_a_byte_an_element_and_else_the_results(on_tpu):
    """Not fused: the mask [B T*D/4 4] of Philox words, its copy in another layout, and its reshape to [B T D]."""
    for dtype in on_tpu:
        for name, results in (("add_and_norm", 2), ("add_and_norm, gradient", 4)):
            masks = [shape for shape in on_tpu[dtype][name] if shape.startswith("pred[")]
            assert (len(masks), len(on_tpu[dtype][name]) - len(masks)) == (3, results)


@needs_libtpu
def test_a_tpu_puts_gate_up_and_swiglu_into_their_products_which_write_one_buffer(on_tpu):
    found = on_tpu["bfloat16"]
    inner = math.prod((BATCH, LENGTH, INNER))
    wide = [shape for shape in found["feed"] if math.prod(map(int, shape[:-1].split("[")[1].split(","))) == inner]
    assert len(wide) == 1 and len(found["swiglu"]) == len(found["gelu"]) == 1
    assert len(found["feed"]) == 3 + 4  # dropout's masks; norm, SwiGLU, down, sum
    assert (len(found["swiglu, gradient"]), len(found["gelu, gradient"])) == (3 + 1, 2)
    assert (len(found["bias_gelu"]), len(found["bias_gelu, gradient"])) == (1, 2 + 1)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_no_kernel_reads_what_all_later_blocks_have_added_to_the_gradient_of_the_residual_stream(norm):
    config = TransformerConfig(
        vocab_size=64, d_model=48, d_ff=80, num_layers=5, num_heads=4, num_kv_heads=4, head_dim=8, max_seq_len=16,
        norm=norm, activation="gelu", position="learned", use_bias=True,
    )  # fmt: skip
    graph, params = parameters.split(transformer.build(config, initial.initial_params(config, 0)))
    tokens, mask = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2, 16), jnp.bool_)
    batch = train.Batch(tokens, tokens, tokens, mask, tokens)

    def loss(params, batch):
        return train.loss_of(train.predict(parameters.merge(graph, params), batch, dropout=None), batch)

    text = jax.jit(jax.grad(loss)).lower(params, batch).compile().as_text()
    kernels_of = [part for part in text.split("\n%") if part.startswith(("fused", "wrapped"))]
    widest = max(len(re.findall(r"= f32\[2,16,48\]\S* parameter\(", part)) for part in kernels_of)
    assert len(kernels_of) > 50 and 1 <= widest <= 3  # 11 from five blocks if every kernel adds all of them up
