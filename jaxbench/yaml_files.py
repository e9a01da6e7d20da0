"""YAML files in which a key stands once, with errors that name file, line and column (S file)."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NEAR = 0.6  # similarity (difflib's ratio) from which a name is suggested, difflib's own default


def read(path: Path) -> dict:
    """Mapping in a YAML file.

    Raises:
      ValueError: there is no such file, or it holds no mapping; names the file and the position in it.
    """
    if not path.is_file():
        raise ValueError(f"config: {path} is {'a folder' if path.is_dir() else 'no file'}{_nearest_file(path)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {path} is not UTF-8 text (byte {error.start})") from error
    if (content := parse(text, f"config: {path}")) is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"config: {path} holds a {type(content).__name__}, wanted a mapping of key: value")
    return content


def parse(text: str, place: str) -> Any:
    """Value of a YAML text; any problem becomes a one-line ValueError that names the place."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply ({len(text)} characters)") from error
    except (LookupError, AttributeError) as error:  # PyYAML's own, as of !!bool x
        raise ValueError(f"{place} is not YAML: a value is not what its tag (!!) says ({error!r})") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that Python rejects
        mark = getattr(error, "problem_mark", None)
        at = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{place}{at} is not YAML: {problem}") from error


def _nearest_file(path: Path) -> str:
    """Suggest a file with a similar name, in the same folder or anywhere in configs/."""
    folder = Path("configs") if Path("configs").is_dir() and not path.is_absolute() else CONFIGS
    near = [
        str(file)
        for file in sorted({*path.parent.glob("*.yaml"), *folder.rglob("*.yaml")})
        if not file.name.startswith(".") and difflib.SequenceMatcher(None, path.stem, file.stem).ratio() >= NEAR
    ]
    hint = difflib.get_close_matches(str(path), near, n=1, cutoff=0.0)
    return f", the nearest is {hint[0]}" if hint else ""


def _loader() -> type:
    """Return a safe YAML loader that refuses duplicate keys; PyYAML's own takes the last value."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses duplicate keys, and keys that are lists or mappings."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # else refused by PyYAML
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(problem=f"a {key.id} cannot be a key", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader
