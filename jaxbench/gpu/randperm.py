"""Record permutations that torch.randperm draws on a GPU, to check green lists that were drawn there.

    python -m jaxbench.gpu.randperm --output=randperm.json
    python -m jaxbench.gpu.randperm --device=cpu --output=randperm.json      those of the CPU's generator

KGW's own code draws a list by torch.randperm(V, device="cuda", generator=g), where g is of that device and seeded by
the context. A CUDA device sorts random keys, of 32 bits up to some 30,000 entries and of 64 beyond, so its permutations
differ from the CPU's (jaxbench/watermark/green_lists.py). Which key an entry gets may depend on how many blocks the
device runs at once, so its multiprocessors are recorded too. For each size and seed the file has

    first, last     the first 32 and the last 8 entries, or all if there are fewer
    sha256          of all entries as little-endian int64

Exit code 1: a drawn array is not a permutation, or a generator that is seeded again draws a different one.
Source: PyTorch, randperm_out_cuda in aten/src/ATen/native/cuda/Randperm.cu.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import Int

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile
from jaxbench.watermark import green_lists

VALUES = flags.FLAGS
FIRST, LAST = 32, 8  # entries that are written out
KGW_PRIME = 15485863  # KGW's seed of a context of one token is this times the token
SIZES = (50257, 49152, 32000, 151936, 30000, 128, 3)
SEEDS = (0, 1, KGW_PRIME, KGW_PRIME * 7, 2**31 - 1, KGW_PRIME * 50256, 2**63 - 1)
LARGEST_SEED = 2**64 - 1  # that manual_seed accepts
CUDA_DRIVER = "libcuda.so.1"


def vector(permutation: Int[np.ndarray, " n"], seed: int) -> dict[str, Any]:
    """Return the recorded facts of a permutation."""
    entries = permutation.astype("<i8")
    return {
        "size": len(entries), "seed": seed, "first": entries[:FIRST].tolist(), "last": entries[-LAST:].tolist(),
        "sha256": hashlib.sha256(entries.tobytes()).hexdigest(),
    }  # fmt: skip


def drawn(sizes: Sequence[int], seeds: Sequence[int], place: str) -> Iterator[dict[str, Any]]:
    """Yield the vector of each size and seed, drawn by PyTorch on cuda or cpu.

    Raises:
      GateFailed: an array is not a permutation, or reseeding a generator, as KGW's code does, gives a different one.
    """
    import torch

    again = torch.Generator(place)
    for size in sizes:
        for seed in seeds:
            generators = torch.Generator(place).manual_seed(seed), again.manual_seed(seed)
            found, second = (
                torch.randperm(size, device=place, generator=generator).cpu().numpy() for generator in generators
            )
            if not np.array_equal(found, second):
                raise cli.GateFailed(f"randperm: size {size}, seed {seed}: drawn again it is another permutation")
            if not np.array_equal(np.sort(found), np.arange(size)):
                raise cli.GateFailed(f"randperm: size {size}, seed {seed}: what {place} drew is no permutation")
            yield vector(found, seed)


def about(place: str) -> dict[str, Any]:
    """Return facts about the generator: the library, and for a GPU its name, multiprocessors and CUDA versions."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "generator": place, "device": "cpu"}
    if place == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name, "multiprocessors": properties.multi_processor_count,
            "threads_per_multiprocessor": getattr(properties, "max_threads_per_multi_processor", None),
            "cuda_of_torch": torch.version.cuda, "cuda_of_driver": driver_version(),
        }  # fmt: skip
    return facts


def driver_version(library: str = CUDA_DRIVER) -> str:
    """Return the newest CUDA version that the driver supports, such as 13.0; empty if unknown."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no such library, or one without that function
        return ""
    return "" if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def numbers(name: str, most: int, *, least: int = 0) -> list[int]:
    """Return the whole numbers of a flag.

    Raises:
      ValueError: there is none, or one is not a whole number or is out of range.
    """
    texts = VALUES[name].value
    for text in texts or [""]:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ValueError(f"--{name}={text!r} is no whole number from {least} to {most}")
    return [int(text) for text in texts]


def main() -> int:
    """Draw every permutation, then write the file."""
    if VALUES.device not in ("gpu", "cpu"):
        raise ValueError(f"--device={VALUES.device}: PyTorch draws on gpu or cpu here")
    sizes, seeds = numbers("sizes", green_lists.LARGEST - 1, least=1), numbers("seeds", LARGEST_SEED)
    output = outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    records = outputs.check_file(VALUES.records, overwrite=True, flag="--records") if VALUES.records else None
    if records is not None and records.absolute() == output.absolute():
        raise ValueError(f"--records={records} is --output too; name another file")
    process_environment.ensure(VALUES.device, library="PyTorch")
    import torch

    if VALUES.device == "gpu" and not torch.cuda.is_available():
        raise ValueError(f"--device={VALUES.device}: PyTorch {torch.__version__} finds no CUDA device here")
    place = "cuda" if VALUES.device == "gpu" else "cpu"
    facts, vectors = about(place), list(drawn(sizes, seeds, place))
    outputs.write_json(output, facts | {"vectors": vectors})
    print(f"{len(vectors)} permutations by {facts['device']} in {output}")
    if records is not None:
        found = Record(
            metric="randperm_vectors", value=len(vectors), unit="count", arm=f"torch {place}", device=VALUES.device,
            commit=environment.commit(), versions=environment.versions(), detail=facts | {"file": Path(output).name},
        )  # fmt: skip
        RecordFile(records).append(found)
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_device("gpu")
    flags.DEFINE_list("sizes", [str(size) for size in SIZES], "entries of the permutations: sizes of vocabularies")
    flags.DEFINE_list("seeds", [str(seed) for seed in SEEDS], "seeds of the generator")
    flags.DEFINE_string("output", "out/gpu-randperm/randperm.json", "file that the permutations are written to")
    flags.DEFINE_bool("overwrite", False, "write over --output")
    flags.DEFINE_string("records", "", "file that a record of it is appended to; unset: none")
    cli.run(main, about=__doc__)
