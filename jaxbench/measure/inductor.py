"""Check whether torch.compile can build code on this machine (S file: PyTorch is looked for, not imported)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile

COMPILERS = ("g++", "clang++", "c++")
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def unusable(device: str) -> str:
    """Return why Inductor cannot build code for a device, or an empty string.

    For CPUs it calls a C++ compiler without quoting paths on the command line (PyTorch 2.13), so every compilation
    fails if the folder of PyTorch, of its cache or of temporary files has a space in its path.
    """
    if device != "cpu":
        return ""
    if not any(map(shutil.which, COMPILERS)):
        return f"torch.compile needs a C++ compiler ({', '.join(COMPILERS)}), none is on the PATH"
    found = importlib.util.find_spec("torch")
    folders = {
        "PyTorch": "" if found is None else found.origin or "",
        CACHE: os.environ.get(CACHE, ""),
        "the folder of temporary files": tempfile.gettempdir(),
    }
    for what, path in folders.items():
        if re.search(r"\s", path):
            return f"torch.compile takes no path with a space, and {what} is {path}; move it, or name another folder"
    return ""
