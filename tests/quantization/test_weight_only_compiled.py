"""The products with packed weights, lowered and compiled for devices that are not here: CUDA, and a TPU by libtpu."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxbench.measure import tpu_compile
from jaxbench.quantization import grids, packed_matmul, packing, weight_only_pallas
from jaxbench.quantization.grids import Grid
from tests.structure import ROOT

GRIDS = {
    "q4_0": Grid(4),
    "zeros": Grid(4, 64, "integer", "bfloat16"),
    "one scale": Grid(4, None, "least", "float32"),
    "q8_0": Grid(8),
    "2 bits": Grid(2, 32, "least", "bfloat16"),
    "3 bits": Grid(3, 16),
    "e4m3": grids.NAMED["fp8"],
}
each_grid = pytest.mark.parametrize("name", GRIDS)
IS_OLD = jax.__version_info__ < (0, 11)
lowers = pytest.mark.skipif(not IS_OLD, reason=f"JAX {jax.__version__} lowers to Triton only beside a GPU")
needs_libtpu = pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed; `pip install triton` brings its compiler (no GPU is needed)",
)


def abstract(grid: Grid, inputs: int, outputs: int, **where) -> packed_matmul.Weights:
    """Weights without values."""
    form = packing.Form(grid, inputs)
    scales = (inputs // form.group, outputs)

    def array(shape: tuple[int, int], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), **where)

    codes = array((inputs // form.per_byte, outputs), "uint8" if grid.type == "int" else "float8_e4m3fn")
    zeros = {"none": None, "integer": "uint8", "least": grid.scale_dtype}[grid.zero]
    return packed_matmul.Weights(
        form, codes, array(scales, grid.scale_dtype), None if zeros is None else array(scales, zeros)
    )


def lowered_for_cuda(name: str, rows: int, outputs: int, dtype: str) -> jax.stages.Lowered:
    x = jax.ShapeDtypeStruct((rows, 576), jnp.dtype(dtype))
    product = jax.jit(functools.partial(weight_only_pallas.matmul, implementation="pallas"))
    return product.trace(x, abstract(GRIDS[name], 576, outputs)).lower(lowering_platforms=("cuda",))


# CUDA


@lowers
@each_grid
@pytest.mark.parametrize(("outputs", "dtype"), [(1536, "bfloat16"), (40, "float32")])
def test_for_cuda_a_product_is_one_triton_kernel_that_is_given_the_bytes(name, outputs, dtype):
    text = lowered_for_cuda(name, 5, outputs, dtype).as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 1 and "xla.gpu.triton" in calls[0]
    operands = re.findall(r"tensor<([^>]+)>", calls[0].rsplit(" : (", 1)[1].split(") -> ")[0])
    form = packing.Form(GRIDS[name], 576)
    chunk = weight_only_pallas.chunk_of(form)
    assert operands[1] == f"{576 // form.per_byte // chunk}x{chunk}x{outputs}xui8"


TRITON = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
for path in sys.argv[1:]:
    for capability in (80, 90):
        made = triton.compile(path, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})
        ptx = made.asm["ptx"]
        found = {"bytes": len(made.asm["cubin"]), "shared": made.metadata.shared, "spills": ".local" in ptx}
        print(json.dumps(found | {"mma": "mma.sync" in ptx or "wgmma" in ptx, "bfloat16": "bfloat16" in path}))
"""


def triton_ir(*product) -> str:
    """The kernel's program as JAX hands it to XLA; the arguments are those of `lowered_for_cuda`."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    calls = []

    def keep(op):
        calls.extend([op] if op.name == "stablehlo.custom_call" else [])
        return ir.WalkResult.ADVANCE

    module = lowered_for_cuda(*product).compiler_ir()
    module.operation.walk(keep)
    code = ir.StringAttr(calls[0].attributes["mhlo.backend_config"]["ir"]).value_bytes
    dialect.register_dialect(module.context)
    with module.context:
        return ir.Module.parse(code).operation.get_asm(enable_debug_info=False)


@lowers
def test_a_gpu_neither_reads_nor_writes_beyond_the_last_output():
    """Interpreted, tiles are cut off at the end by themselves; here it is the mask alone."""
    text = triton_ir("q4_0", 5, 40, "float32")
    (mask, end) = re.search(r"(%\d+) = arith.cmpi slt, %\d+, (%\d+) : tensor<1x64xi32>", text).groups()
    constant = re.search(rf"{end} = tt.splat (%\S+) : i32 -> tensor<1x64xi32>", text).group(1)
    assert f"{constant} = arith.constant 40 : i32" in text
    masks = set(re.findall(rf"(%\d+) = tt.broadcast {mask} : tensor<1x64xi1>", text))
    reads = re.findall(r"tt.load %\d+, (%\d+), %\d+ : tensor<\S+x64x!tt.ptr", text)
    writes = re.findall(r"tt.store %\d+, %\d+, (%\d+) : tensor<\S+x64x!tt.ptr", text)
    assert len(reads) == len(re.findall("tt.load .*x64x!tt.ptr", text)) >= 2
    assert len(writes) == text.count("tt.store") == 1
    assert {*reads, *writes} <= masks


@lowers
@needs_triton
def test_tritons_compiler_makes_programs_of_ampere_and_hopper_of_it(tmp_path):
    """What JAX hands to XLA is compiled by Triton's own package, which is another version than the one in XLA."""
    for name in GRIDS:
        for rows, outputs, dtype in ((5, 1536, "bfloat16"), (5, 40, "float32"), (64, 1536, "float32")):
            text = triton_ir(name, rows, outputs, dtype)
            (tmp_path / f"{name}_{rows}_{outputs}_{dtype}.ttir").write_text(text)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", TRITON, *map(str, sorted(tmp_path.glob("*.ttir")))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 2 * 3 * len(GRIDS)
    for each in made:
        assert each["bytes"] > 1000 and each["shared"] < 99 * 2**10 and not each["spills"]
        assert each["mma"] == each["bfloat16"]  # tensor cores; float32 is multiplied in full


# TPU

ROWS, INPUTS, OUTPUTS = 16, 1024, 512
TPU = """
import functools, json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxbench.measure import chips, tpu_compile
from jaxbench.quantization import weight_only_pallas
from tests.quantization.test_weight_only_compiled import GRIDS, INPUTS, OUTPUTS, ROWS, abstract
for name, implementation, dtype, shape, slice_ in json.loads(sys.argv[1]):
    topology = chips.parse_topology(slice_)
    where = NamedSharding(Mesh(np.array(tpu_compile.devices(topology)[:1]), ("x",)), PartitionSpec())
    rows, inputs, outputs = shape
    weights = abstract(GRIDS[name], inputs, outputs, sharding=where)
    x = jax.ShapeDtypeStruct((rows, inputs), dtype, sharding=where)
    product = jax.jit(functools.partial(weight_only_pallas.matmul, implementation=implementation))
    texts = []
    def lower():
        lowered = product.lower(x, weights)
        texts.append(lowered.as_text())
        return lowered
    memory = tpu_compile.compile_program(lower, topology).memory
    held = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(weights))
    print(json.dumps(memory | {"held": held, "kernels": texts[0].count("tpu_custom_call")}))
"""
SMALL, LARGE = (ROWS, INPUTS, OUTPUTS), (ROWS, 28672, 8192)
SLICES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "v4:2x2x1")
WANTED = [
    (name, implementation, dtype, SMALL, SLICES[0])
    for name in GRIDS
    for implementation, dtype in (("pallas", "bfloat16"), ("mosaic", "float32"), ("xla", "bfloat16"))
]
WANTED += [("q8_0", implementation, "bfloat16", LARGE, SLICES[0]) for implementation in ("pallas", "xla")]
WANTED += [(name, "pallas", "float32", (37, 576, 200), slice_) for name in ("q4_0", "e4m3") for slice_ in SLICES]


@pytest.fixture(scope="module")
def compiled():
    """Compile the products for one chip; return what the compiler says of each."""
    environment = os.environ | tpu_compile.ENVIRONMENT | {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", TPU, json.dumps(WANTED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(WANTED, map(json.loads, done.stdout.splitlines()), strict=True))


@needs_libtpu
@each_grid
def test_a_tpus_program_is_given_the_integers_and_nothing_else(compiled, name):
    form = packing.Form(GRIDS[name], INPUTS)
    for (own, implementation, dtype, shape, _), memory in compiled.items():
        if own != name or shape != SMALL:
            continue
        rows = ROWS * INPUTS * jnp.dtype(dtype).itemsize
        if INPUTS // form.group >= 16:  # fewer rows of scales are padded to a tile of the chip's memory
            assert memory["argument"] == memory["held"] + rows, implementation
        assert 0 <= memory["argument"] - memory["held"] - rows <= 2 * 16 * OUTPUTS * 4, implementation
        assert memory["kernels"] == (implementation != "xla")
        if implementation != "xla":
            assert memory["temp"] == 0


@needs_libtpu
def test_xla_writes_out_float_weights_that_share_scales_and_the_kernel_does_not(compiled):
    kernel, xla = (
        compiled["q8_0", implementation, "bfloat16", LARGE, SLICES[0]] for implementation in ("pallas", "xla")
    )
    assert kernel["temp"] == 0
    assert xla["temp"] >= 2 * LARGE[1] * LARGE[2]


@needs_libtpu
@pytest.mark.parametrize("slice_", SLICES)
def test_shapes_off_the_tiles_compile_for_every_tpu(compiled, slice_):
    for name in ("q4_0", "e4m3"):
        assert compiled[name, "pallas", "float32", (37, 576, 200), slice_]["kernels"] == 1
