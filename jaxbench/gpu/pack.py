"""Pack one folder to carry to a machine without a network: code, text and the wheels that the machine lacks (S file).

The machine has Python 3.12 on Linux x86-64, JAX, PyTorch, Flax and their dependencies. `run` in the folder installs the
wheels in addition, for its own process only. It joins the default model's two packs if they are next to the folder, and
passes its arguments to experiments/gpu.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxbench import outputs
from jaxbench.measure import process
from jaxbench.pretrained import assets

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 60 * 2**20  # of each pack
FOLDERS = ("jaxbench", "torch_ref", "experiments", "configs")
LEFT_OUT = ("experiments/results/",)  # and weights that jaxbench ships, which only workloads without a stage need
SHIPPED_WEIGHTS = ".safetensors"
# Missing or too old on the machine; pure Python or for CPython 3.12. Versions are those of constraints.txt.
WHEELS = (
    "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "confusable-homoglyphs", "gguf",
    "platformdirs", "plotly", "narwhals", "ruptures", "tensorboardX", "starlette", "uvicorn", "httptools",
)  # fmt: skip
# The peer of the neural memory, and its dependencies besides PyTorch; versions are those of `make peers`.
TITANS = (
    "titans-pytorch", "accelerated-scan", "assoc-scan", "axial_positional_embedding", "cloudpickle", "einops", "einx",
    "frozendict", "hyper-connections", "loguru", "pyvers", "rotary-embedding-torch", "tensordict", "torch-einops-utils",
    "tqdm", "x-transformers",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
ADVICE = "carry the wheels of `make gpu_pack` and begin with its script `run`"
RUN = """#!/usr/bin/env bash
# Arguments are those of experiments/gpu.py, places those of the folder it is called from: bash run --workdir=RESULTS
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
python=${PYTHON:-python3}
install=("$python" -m pip install -q --no-index --no-deps --no-compile --target "$site")
if ! "${install[@]}" "$here"/wheels/*.whl; then # one that does not fit this Python leaves the others
  fitting=()
  for wheel in "$here"/wheels/*.whl; do
    if "${install[@]}" --dry-run "$wheel"; then fitting+=("$wheel"); else echo "left out: ${wheel##*/}" >&2; fi
  done # in one call: a second one leaves out what shares a folder with the first one's
  [ ${#fitting[@]} -eq 0 ] || "${install[@]}" "${fitting[@]}" || echo "left out: all wheels" >&2
fi
export PYTHONPATH="$site:$here${PYTHONPATH:+:$PYTHONPATH}"
parts=("$here"-model-1/part "$here"-model-2/part)
if [ -e "${parts[0]}" ] && [ -e "${parts[1]}" ]; then
  export JAXBENCH_CACHE=${JAXBENCH_CACHE:-$site/cache}
  mkdir -p "$JAXBENCH_CACHE/models"
  cat "${parts[@]}" > "$JAXBENCH_CACHE/models/$(cat "$here"-model-1/name)"
fi
words=()
before=
for word in "$@"; do # configurations may be the pack's own
  case $before,$word in
    --config,* | -config,*) name=$word ;;
    *,--config=* | *,-config=*) name=${word#*=} ;;
    *) name= ;;
  esac
  before=$word
  if [ -n "$name" ] && [ ! -e "$name" ] && [ -e "$here/$name" ]; then word=${word%"$name"}$here/$name; fi
  words+=("$word")
done
exec "$python" "$here/experiments/gpu.py" ${words[@]+"${words[@]}"}
"""


def gather(folder: Path, *, with_model: bool = False) -> Iterator[str]:
    """Write the pack, which must not exist yet; yield a line with the size of each folder.

    with_model: also pack the default model, in two halves, in the folders FOLDER-model-1 and FOLDER-model-2.

    Raises:
      ValueError: a folder exists already; a pack is over LIMIT_BYTES; pip does not find a wheel; git lists no files; or
        the model is neither cached nor can be fetched.
    """
    halves = [folder.with_name(f"{folder.name}-model-{k}") for k in (1, 2)] if with_model else []
    for each in (folder, *halves):
        if each.exists():
            raise ValueError(f"--pack={folder}: {each} is there already; remove it or name another folder")
    model = assets.fetch_default_model() if with_model else None  # before anything is written
    with outputs.whole_folder(folder) as temporary:
        for name in code_files():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        download(temporary / "wheels")
        (temporary / "run").write_text(RUN, encoding="utf-8")
        _checked(folder, temporary)
    yield f"{folder}  {size_of(folder) / 2**20:.1f} MiB; there: bash {folder.name}/run --workdir=RESULTS"
    if model is not None:
        content = model.read_bytes()
        for k, half in enumerate(halves):
            with outputs.whole_folder(half) as temporary:
                middle = len(content) // 2
                (temporary / "part").write_bytes(content[:middle] if k == 0 else content[middle:])
                (temporary / "name").write_text(model.name, encoding="utf-8")
                _checked(half, temporary)
            yield f"{half}  {size_of(half) / 2**20:.1f} MiB"


def code_files() -> list[str]:
    """Return the code's files that git lists, as paths from the root.

    Raises:
      ValueError: this is not a git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    if not names:
        raise ValueError(f"gpu: {ROOT} is no git checkout ({done.stderr.strip()[:200]}), which says what the code is")
    return [name for name in names if not name.startswith(LEFT_OUT) and not name.endswith(SHIPPED_WEIGHTS)]


def wanted_versions() -> list[str]:
    """Return the wheels with the versions of constraints.txt, or of .ci/peers/titans.txt."""
    files = (ROOT / ".ci/peers/titans.txt", ROOT / "constraints.txt")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    pinned = {
        match[1].lower().replace("_", "-"): match[2]
        for match in re.finditer(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE)
    }
    found = []
    for name in (*WHEELS, *TITANS):
        version = pinned.get(name.lower().replace("_", "-"))
        found.append(f"{name}=={version}" if version else name)
    return found


def download(folder: Path) -> None:
    """Fetch the wheels for CPython 3.12 on Linux x86-64.

    Raises:
      ValueError: pip does not find one; its last line says which.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version=3.12", "--implementation=cp", *(f"--platform={each}" for each in PLATFORMS)]
    done = subprocess.run([*command, *wanted_versions()], capture_output=True, text=True)
    if done.returncode:
        last = process.last_line(done.stderr, "pip said nothing")
        raise ValueError(f"gpu: pip could not fetch the wheels {', '.join((*WHEELS, *TITANS))}: {last}")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _checked(folder: Path, temporary: Path) -> None:
    if (size := size_of(temporary)) > LIMIT_BYTES:
        raise ValueError(f"--pack={folder}: {size / 2**20:.1f} MiB, wanted at most {LIMIT_BYTES / 2**20:.0f}")
