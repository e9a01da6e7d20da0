"""TensorBoard's event files without PyTorch (S file).

tensorboardX imports PyTorch where it is installed, to accept its tensors: seconds of every command that has none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


def library() -> ModuleType:
    """Import and return tensorboardX, and PyTorch with it only if this process has imported that already."""
    with _hidden("torch"):
        import tensorboardX
        import tensorboardX.record_writer
    return tensorboardX


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let `import name` fail as if it were not installed, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None
    try:
        yield
    finally:
        del sys.modules[name]
