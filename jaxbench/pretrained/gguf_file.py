"""Read GGUF files, versions 2 and 3, little-endian (S file).

Only the container is parsed here, because `gguf.GGUFReader` takes 1.8 s for the default model's vocabulary versus 0.1 s
here, and because a damaged file should give one clear error; the `gguf` package dequantises the values.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type code
STRING, ARRAY = 8, 9
# Types that `gguf` does not convert to float32: integers, and those of llama.cpp's intermediate results
NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0")
# Name, values and bytes of a block by type code: `gguf` has all of them, but takes 30 ms to import
COMMON = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
MAX_NESTING = 4  # deeper arrays of arrays appear in no real file
DEFAULT_ALIGNMENT = 32  # bytes


class TensorInfo(NamedTuple):
    """Location of one tensor: shape with the slowest axis first, ggml type code, offset and size in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class GgufFile(NamedTuple):
    """Metadata and table of contents of one file, whose bytes stay memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    content: mmap.mmap

    def tensor(self, name: str) -> np.ndarray:
        """Values of one tensor, dequantised to float32."""
        info = self.tensors[name]
        if info.kind == 0:
            return np.frombuffer(self.content, "<f4", info.size // 4, info.offset).reshape(info.shape)
        from gguf import constants, quants

        raw = np.frombuffer(self.content, np.uint8, info.size, info.offset)
        rows = raw.reshape(*info.shape[:-1], -1)
        return quants.dequantize(rows, constants.GGMLQuantizationType(info.kind)).reshape(info.shape)


def type_of(kind: int) -> tuple[str, int, int]:
    """Return a type code's name, and the values and bytes of one of its blocks.

    Raises:
      ValueError: there is no such type.
    """
    if kind in COMMON:
        return COMMON[kind]
    from gguf import constants

    known = constants.GGMLQuantizationType(kind)
    return known.name, *constants.GGML_QUANT_SIZES[known]


def read(path: str | Path) -> GgufFile:
    """Parse a file's header and check that every tensor lies in its place inside the file.

    Raises:
      ValueError: not a GGUF file, one part of several, an unknown version or type, a tensor that lies elsewhere than
        after the one before, or a file that ends early.
    """
    path = Path(path)
    with open(path, "rb") as file:
        start = file.read(8)
        if start[:4] == MAGIC and len(start) < 8:
            raise ValueError(f"{path}: truncated GGUF file of {len(start)} bytes; wanted a header of more")
        if start[:4] != MAGIC:
            raise ValueError(f"{path}: not a GGUF file (starts with {start[:4]!r}, wanted {MAGIC!r})")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    version = int.from_bytes(start[4:], "little")
    if version not in VERSIONS:
        raise ValueError(f"{path}: GGUF version {version} is not supported, wanted one of {VERSIONS}")
    try:
        return _Parser(path, content).parse()
    except struct.error as error:
        raise ValueError(f"{path}: truncated or corrupt GGUF file of {len(content)} bytes ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: corrupt GGUF header, a string is not UTF-8 ({error.reason})") from error


class _Parser:
    """A cursor over the mapped bytes; struct raises if they end early."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at = path, content, 8

    def parse(self) -> GgufFile:
        num_tensors, num_values = self.unpack("QQ")
        metadata = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(self.unpack("I")[0])
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ValueError(
                f"{self.path}: one of {parts} parts of a model, wanted the whole in one file: "
                "llama-gguf-split --merge FIRST_PART WHOLE"
            )
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path}: corrupt GGUF header, general.alignment={alignment!r}")
        data_start = -(-self.at // alignment) * alignment
        tensors = {name: self.locate(name, entry, data_start) for name, entry in entries}
        if len(tensors) != num_tensors:
            names = sorted({name for name, _ in entries if sum(name == other for other, _ in entries) > 1})
            raise ValueError(f"{self.path}: corrupt GGUF header, tensors named twice: {', '.join(names[:8])}")
        self.check_places(tensors, data_start, alignment)
        return GgufFile(self.path, metadata, tensors, self.content)

    def check_places(self, tensors: dict[str, TensorInfo], at: int, alignment: int) -> None:
        """Check that tensors lie in their order without gaps, as ggml does: elsewhere are another tensor's numbers."""
        for name, info in tensors.items():
            if info.offset != at:
                raise ValueError(
                    f"{self.path}: corrupt GGUF header, tensor {name!r} begins at byte {info.offset}, wanted {at}: "
                    "after the one before, aligned; fetch it again"
                )
            at += -(-info.size // alignment) * alignment

    def unpack(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self.content, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if length > len(self.content) - self.at:
            raise struct.error(f"a string of {length} bytes at byte {self.at}")
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """Read consecutive strings: a vocabulary of 100,000 in a third of the time of string()."""
        content, at, end, found = self.content, self.at, len(self.content), []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length_at(content, at)[0]
            if at > end:
                raise struct.error(f"a string of {at - start} bytes at byte {start}")
            found.append(content[start:at])
        self.at = at
        return [each.decode("utf-8") for each in found]

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.unpack(SCALARS[kind])[0]
        if kind != ARRAY or nesting > MAX_NESTING:
            raise ValueError(f"{self.path}: corrupt GGUF header, value type {kind} at byte {self.at}")
        kind, length = self.unpack("IQ")
        if length > len(self.content) - self.at:
            raise struct.error(f"an array of {length} values at byte {self.at}")
        if kind in SCALARS:
            return list(self.unpack(f"{length}{SCALARS[kind]}"))
        if kind == STRING:
            return self.strings(length)
        return [self.value(kind, nesting + 1) for _ in range(length)]

    def tensor_entry(self) -> tuple[str, tuple]:
        """Read the name and (shape, type code, offset) of the next tensor in the table of contents."""
        name = self.string()
        (num_dims,) = self.unpack("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"{self.path}: corrupt GGUF header, tensor {name!r} has {num_dims} dimensions")
        shape = self.unpack(f"{num_dims}Q")[::-1]
        return name, (shape, *self.unpack("IQ"))

    def locate(self, name: str, entry: tuple, data_start: int) -> TensorInfo:
        """Locate one tensor, and check that it lies inside the file."""
        shape, kind, offset = entry
        try:
            type_name, block, block_bytes = type_of(kind)
        except ValueError:
            raise ValueError(f"{self.path}: tensor {name!r} has the unknown GGUF type {kind}") from None
        if type_name in NO_WEIGHTS:
            wanted = "F32, F16, BF16 or a quantised type of weights"
            raise ValueError(f"{self.path}: tensor {name!r} has type {type_name}, wanted {wanted}")
        num_values = int(np.prod(shape, dtype=object))
        if shape[-1] % block:
            raise ValueError(f"{self.path}: tensor {name!r} has rows of {shape[-1]} values, not a multiple of {block}")
        size = num_values // block * block_bytes
        end = data_start + offset + size
        if end > len(self.content):
            raise ValueError(
                f"{self.path}: truncated GGUF file, tensor {name!r} ends at byte {end} of {len(self.content)}; "
                "fetch it again"
            )
        return TensorInfo(shape, kind, data_start + offset, size)
