"""K-quants of GGUF files: blocks of 256 values, with scales of their own for 16 or 32, dequantised exactly."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxbench.pretrained import gguf_file

# Places of the float16 scales in a block; the other bytes may have any value.
SCALE_PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _random_blocks(kind: gguf.GGMLQuantizationType, rows: int, values: int) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (rows * values // block, size), dtype=np.uint8)
    for place in SCALE_PLACES[kind.name]:
        scales = random.uniform(0.001, 0.1, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def _write(path: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("only", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _q4_k(block: np.ndarray) -> np.ndarray:
    """Dequantise one block as ggml's documentation of `block_q4_K` tells it: d * scale * q - dmin * minimum."""
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    packed, quants = block[4:16].astype(int), block[16:144]
    scales = [packed[j] & 63 if j < 4 else (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4) for j in range(8)]
    minima = [packed[j + 4] & 63 if j < 4 else (packed[j + 4] >> 4) | (packed[j] >> 6 << 4) for j in range(8)]
    out = []
    for j in range(8):  # 32 values each; pairs share 32 bytes, the first in the low halves
        half = quants[32 * (j // 2) : 32 * (j // 2 + 1)]
        nibbles = (half & 15 if j % 2 == 0 else half >> 4).astype(np.float32)
        out.append(d * np.float32(scales[j]) * nibbles - dmin * np.float32(minima[j]))
    return np.concatenate(out)


def _q6_k(block: np.ndarray) -> np.ndarray:
    """Dequantise one block as ggml's documentation of `block_q6_K` tells it: d * scale * (q - 32)."""
    low, high, scales = block[:128].astype(int), block[128:192].astype(int), block[192:208].view(np.int8)
    d, out = block[208:].view(np.float16).astype(np.float32)[0], np.zeros(256, np.float32)
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, lane = divmod(place, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
        value = nibble | (high[32 * half + lane] >> (2 * quarter) & 3) << 4
        out[i] = d * np.float32(scales[i // 16]) * np.float32(value - 32)
    return out


@pytest.mark.parametrize("kind", SCALE_PLACES)
def test_k_quants_are_dequantised_exactly(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    raw = _random_blocks(kind, 2, 512)
    _write(tmp_path / "k.gguf", raw, kind)
    found = gguf_file.read(tmp_path / "k.gguf").tensor("only")
    assert found.shape == (2, 512) and found.dtype == np.float32 and len(np.unique(found)) > 100
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))
    by_hand = {"Q4_K": _q4_k, "Q6_K": _q6_k}.get(kind.name)
    if by_hand is not None:
        blocks = raw.reshape(4, -1)
        np.testing.assert_array_equal(found.reshape(4, 256), [by_hand(block.copy()) for block in blocks])


def test_rows_that_are_no_whole_k_blocks_are_refused(tmp_path):
    _write(tmp_path / "k.gguf", np.zeros((1, 144), np.uint8), gguf.GGMLQuantizationType.Q4_K)
    header, name, rest = (tmp_path / "k.gguf").read_bytes().partition(b"only")
    rest = rest.replace((256).to_bytes(8, "little"), (250).to_bytes(8, "little"), 1)
    (tmp_path / "k.gguf").write_bytes(header + name + rest)
    with pytest.raises(ValueError, match="tensor 'only' has rows of 250 values, not a multiple of 256"):
        gguf_file.read(tmp_path / "k.gguf")
