"""A Pallas kernel for products with packed weights; its reference is packed_matmul.py.

One kernel body serves Triton (NVIDIA GPUs) and Mosaic (TPUs). A program of the grid has one tile of rows and one of
outputs; it loops over the inputs in chunks, unpacks the codes from their bytes in registers, and accumulates in
float32. x and weights are passed with the chunk as leading axis, so that nothing is sliced within a TPU's tiles. Rows
are padded (they are few), weights never: outputs beyond the last are masked on GPUs and dropped by Mosaic on TPUs.

It has no derivative and is not sharded over a mesh; XLA's product supports both.

Tested so far: interpreted, it computes the reference's products; libtpu compiles it for TPUs; lowered for CUDA,
Triton's package compiles it for compute capability 8.0 and 9.0. It has run neither on a GPU nor on a TPU, and its speed
is unknown.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from jaxbench.quantization import packed_matmul, packing
from jaxbench.quantization.packed_matmul import Weights
from jaxbench.quantization.packing import Form

BY_PLATFORM = {"cuda": "triton", "tpu": "mosaic"}
CHUNKS = (128, 64, 32, 16)  # bytes of an output that are processed at once; tensor cores need 16
CHUNK_INPUTS = 128  # most inputs that a chunk holds, for the GPU's shared memory
SPAN = 8  # fewest bytes that share a scale: the rows of a TPU register
ROW_TILES = (16, 32, 64)  # rows of a tile; tensor cores need 16
OUTPUT_TILE = 128  # outputs of a tile: the lanes of a TPU's register


def matmul(
    x: Float[Array, "*rows I"], weights: Weights, *, implementation: str, interpret: bool = False
) -> Float[Array, "*rows O"]:
    """Multiply x by the weights; the result has x's type.

    Args:
      implementation: xla = packed_matmul.matmul. pallas = the kernel if the program is compiled for CUDA or TPUs and
        `misfit` accepts the weights; XLA otherwise. triton and mosaic = the kernel of that name.
      interpret: run the kernel's program on any platform, slowly, for tests.

    Raises:
      ValueError: an unknown implementation, x with another number of inputs, or a kernel selected by name that does not
        take the weights.
    """
    packing.check_implementation(implementation)
    packed_matmul.check_inputs(x.shape, weights.form)
    reason = misfit(weights.form)
    if implementation == "xla" or (implementation == "pallas" and reason):
        return packed_matmul.matmul(x, weights)
    if reason:
        raise ValueError(f"weight_only: no kernel {implementation!r} for these weights: {reason}")
    if implementation == "pallas":
        kernels = {name: functools.partial(_product, kernel=kernel) for name, kernel in BY_PLATFORM.items()}
        return lax.platform_dependent(x, weights, default=packed_matmul.matmul, **kernels)
    return _product(x, weights, kernel=implementation, interpret=interpret)


def misfit(form: Form) -> str:
    """Return why the kernel does not take weights of a form, or an empty string."""
    if not chunk_of(form):
        return (
            f"{form.span} bytes of {form.inputs // form.per_byte} an output share a scale; wanted at least {SPAN}, and "
            f"chunks of {CHUNKS[-1]} or more that are whole groups or parts of one"
        )
    return ""


def chunk_of(form: Form) -> int:
    """Bytes of an output that are processed at once, 0 if no size fits."""
    size, span = form.inputs // form.per_byte, form.span
    small = (c for c in CHUNKS if c * form.per_byte <= CHUNK_INPUTS)
    fitting = (c for c in small if size % c == 0 and (c % span == 0 or span % c == 0))
    return next(fitting, 0) if span >= SPAN else 0


def _product(x: Array, weights: Weights, *, kernel: str, interpret: bool = False) -> Array:
    """Run the kernel: arrays with the chunk as leading axis, rows padded to whole tiles."""
    from jax.experimental import pallas as pl

    form, outputs, chunk = weights.form, weights.codes.shape[1], chunk_of(weights.form)
    rows = x.reshape(-1, form.inputs)
    row_tile = next((size for size in ROW_TILES if len(rows) <= size), ROW_TILES[-1])
    padded = jnp.pad(rows, ((0, -len(rows) % row_tile), (0, 0)))
    # [rows, groups, places, span] -> [chunks, places, rows, chunk]
    grouped = padded.reshape(len(padded), -1, form.per_byte, form.span).transpose(2, 0, 1, 3)
    chunked = grouped.reshape(form.per_byte, len(padded), -1, chunk).transpose(2, 0, 1, 3)
    scaling = [weights.scales] if weights.zeros is None else [weights.scales, weights.zeros]
    per_chunk = max(1, chunk // form.span)
    operands = [weights.codes.reshape(-1, chunk, outputs), *(s.reshape(-1, per_chunk, outputs) for s in scaling)]
    operands = [chunked, *map(_as_bits, operands)]
    tile = OUTPUT_TILE if outputs > OUTPUT_TILE else outputs
    if kernel == "triton":  # a power of two
        tile = min(OUTPUT_TILE, max(16, 1 << (outputs - 1).bit_length()))
    specs = [pl.BlockSpec((*chunked.shape[:2], row_tile, chunk), lambda o, r: (0, 0, r, 0))]
    specs += [pl.BlockSpec((*array.shape[:2], tile), lambda o, r: (0, 0, o)) for array in operands[1:]]
    masked = outputs if kernel == "triton" and outputs % tile else None
    product = pl.pallas_call(
        functools.partial(_kernel, form=form, outputs=masked),
        jax.ShapeDtypeStruct((len(padded), outputs), x.dtype),
        grid=(pl.cdiv(outputs, tile), len(padded) // row_tile),
        in_specs=specs,
        out_specs=pl.BlockSpec((row_tile, tile), lambda o, r: (r, o)),
        compiler_params=_compiler_params(kernel),
        interpret=interpret,
        name="weight_only",
    )
    return product(*operands)[: len(rows)].reshape(*x.shape[:-1], outputs)


def _as_bits(array: Array) -> Array:
    """Codes and scales of types that not every kernel converts, as integers of the same bits (float_values)."""
    bits = {"float16": jnp.uint16, "float8_e4m3fn": jnp.uint8}.get(array.dtype.name)
    return array if bits is None else lax.bitcast_convert_type(array, bits)


def _compiler_params(kernel: str):
    if kernel == "triton":
        from jax.experimental.pallas import triton

        return triton.CompilerParams(num_warps=4, num_stages=2)
    from jax.experimental.pallas import tpu

    return tpu.CompilerParams(dimension_semantics=("parallel", "parallel"))


def _kernel(x_ref, codes_ref, scales_ref, *refs, form: Form, outputs: int | None) -> None:
    """Product of a tile of rows and a tile of outputs; outputs: their number, if tiles extend beyond it."""
    from jax.experimental import pallas as pl

    *zeros_ref, out_ref = refs
    chunks, places, rows, chunk = x_ref.shape
    tile = out_ref.shape[1]
    is_output = None
    if outputs is not None:
        is_output = pl.program_id(0) * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1) < outputs
    chunks_per_group = max(1, form.span // chunk)
    precision = packed_matmul.PRECISIONS.get(x_ref.dtype.name)

    def add_chunk(index, total):
        codes = _read(codes_ref, index, is_output)
        if form.grid.type == "e4m3":
            codes = float_values(codes, exponent=4, fraction=3)
        group = index if chunks_per_group == 1 else lax.div(index, chunks_per_group)
        scales, *zeros = (_each(_read(ref, group, is_output), chunk) for ref in (scales_ref, *zeros_ref))
        for place in range(places):
            own = packed_matmul.values(codes, scales, zeros[0] if zeros else None, form=form, place=place)
            total += jnp.dot(
                x_ref[index, place], own.astype(x_ref.dtype), precision=precision, preferred_element_type=jnp.float32
            )
        return total

    total = lax.fori_loop(0, chunks, add_chunk, jnp.zeros((rows, tile), jnp.float32)).astype(out_ref.dtype)
    if is_output is None:
        out_ref[...] = total
        return
    from jax.experimental.pallas import triton

    triton.store(out_ref, total, mask=jnp.broadcast_to(is_output, total.shape))


def _read(ref, index, is_output: Array | None) -> Array:
    """One chunk's part of an array; zeros where there is no output."""
    if is_output is None:
        return ref[index]
    from jax.experimental.pallas import triton

    mask = jnp.broadcast_to(is_output, ref.shape[1:])
    return triton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def float_values(bits: Shaped[Array, "*shape"], *, exponent: int, fraction: int) -> Float[Array, "*shape"]:
    """Values in float32 of finite floats that are given as bits: a sign, `exponent` bits, `fraction` bits.

    The device's own conversion is not used: Mosaic loads no float16, Triton converts e4m3 only from capability 8.9 on.
    """
    wide, bias = bits.astype(jnp.int32), 2 ** (exponent - 1) - 1
    power, rest = (wide >> fraction) & (2**exponent - 1), wide & (2**fraction - 1)
    # Subnormals have no leading 1; as bits of a float32, float16's would be among the values that TPUs flush to 0.
    least = rest.astype(jnp.float32) * 2.0 ** (1 - bias - fraction)
    normal = lax.bitcast_convert_type(((power + 127 - bias) << 23) | (rest << (23 - fraction)), jnp.float32)
    magnitude = jnp.where(power == 0, least, normal)
    return jnp.where(wide >> (exponent + fraction) == 1, -magnitude, magnitude)


def _each(part: Array, chunk: int) -> Array:
    """Scales or zeros of groups, expanded to every byte of a chunk, as integers or float32."""
    if part.dtype == jnp.uint16:
        wide = float_values(part, exponent=5, fraction=10)
    else:
        wide = part.astype(jnp.int32 if part.dtype == jnp.uint8 else jnp.float32)
    if len(wide) == 1:
        return wide
    repeated = jnp.broadcast_to(wide[:, None, :], (len(wide), chunk // len(wide), wide.shape[1]))
    return repeated.reshape(chunk, -1)
