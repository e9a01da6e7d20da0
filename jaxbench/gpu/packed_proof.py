"""Check products with packed weights on a device, by XLA and by the Pallas kernel, against numpy in float64.

    python -m jaxbench.gpu.packed_proof --output=results.jsonl
    python -m jaxbench.gpu.packed_proof --device=cpu              the kernel interpreted

Exit code 1: an error is over its limit, which is 1e-5 of the largest product for float32 rows and 2**-8 of it for
bfloat16 rows (whose weights are rounded to bfloat16). A kernel that does not compile is recorded as an error, and the
others continue.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile
from jaxbench.quantization import grids, packing
from jaxbench.quantization.grids import Grid

VALUES = flags.FLAGS
LIMITS = {"float32": 1e-5, "bfloat16": 2.0**-8}
# Grid, inputs, outputs, rows: sizes that tiles divide and that they do not, groups smaller and larger than a chunk.
CASES = {
    "q4_0": (Grid(4), 96, 40, 5),
    "q4_1": (grids.NAMED["q4_1"], 128, 130, 1),
    "int8": (grids.NAMED["int8"], 576, 1536, 1),
    "int4": (Grid(4, 32), 2048, 512, 64),
    "large groups": (Grid(8, 64, "integer", "bfloat16"), 192, 33, 70),
    "2 bits": (Grid(2, 32, "least", "bfloat16"), 128, 64, 5),
    "e4m3": (grids.NAMED["fp8"], 48, 136, 5),
}
IMPLEMENTATIONS = ("xla", "triton")


def error_of(case: str, implementation: str, dtype: str, *, interpret: bool) -> float:
    """Return the largest error of a case's products on the default device, relative to the largest product."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes

    from jaxbench.quantization import packed_matmul, weight_only_pallas

    grid, inputs, columns, count = CASES[case]
    random = np.random.default_rng(0)
    matrix = grids.nearest(0.1 * random.normal(size=(columns, inputs)).astype(np.float32), grid)
    x, kernel = random.normal(size=(count, inputs)).astype(np.float32), grids.dequantized(matrix).T
    if dtype == "bfloat16":
        x, kernel = (each.astype(ml_dtypes.bfloat16) for each in (x, kernel))
    wanted = x.astype(np.float64) @ kernel.astype(np.float64)
    how: dict[str, Any] = {"implementation": implementation, "interpret": interpret and implementation != "xla"}
    product = jax.jit(functools.partial(weight_only_pallas.matmul, **how))
    found = product(jnp.asarray(x), packed_matmul.put(packing.pack(matrix)))
    return float(np.max(np.abs(np.asarray(found).astype(np.float64) - wanted)) / np.max(np.abs(wanted)))


def main() -> int:
    """Check every case and append a record of each; fail if one is over its limit."""
    file = RecordFile(outputs.check_file(VALUES.output, overwrite=True))
    process_environment.ensure(VALUES.device)
    common = {"device": VALUES.device, "commit": environment.commit(), "versions": environment.versions()}
    off = []
    for implementation in IMPLEMENTATIONS:  # XLA first: a failing kernel may make the device unusable
        for case in CASES:
            for dtype, limit in LIMITS.items():
                name, reason, error = f"{case} {implementation} {dtype}", "", float("inf")
                try:
                    error = error_of(case, implementation, dtype, interpret=VALUES.device == "cpu")
                except Exception as raised:  # a compiler's error about a kernel may be of any type
                    reason = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
                if not reason and not math.isfinite(error):
                    reason = f"the error is {error}"
                passed = not reason and error <= limit
                gate = {"passed": passed, "error": None if reason else error, "limit": limit}
                status = {"status": "error", "reason": reason} if reason else {}
                file.append(
                    Record(
                        metric="parity", arm=name, value=float(passed), unit="count", detail=gate, **status, **common
                    )
                )
                print(f"{name}: {reason or f'{error:.2g} of at most {limit:.2g}'}", flush=True)
                off += [] if passed else [f"{name}: {reason or f'{error:.3g}, wanted at most {limit:.3g}'}"]
    if off:
        raise cli.GateFailed(f"{len(off)} products are off, the first: {off[0]}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_device("gpu")
    flags.DEFINE_string("output", "out/gpu-packed-proof/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
