"""The documents' snippets and commands, as they stand there, by a user whose shell sets nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.structure import ROOT, sources
from tests.test_cli import shell_environment


def run(code: str) -> subprocess.CompletedProcess:
    environment = shell_environment(PYTHONPATH=str(ROOT))
    environment.pop("TPU_SKIP_MDS_QUERY")
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


def test_the_library_snippet_completes_its_prompt_and_prints_nothing_else():
    snippet = re.search(r"As a library:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    done = run(snippet + "\nimport jax\nprint(jax.config.jax_platforms)")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith(" Paris.") and done.stdout.endswith("\ncpu\n"), done.stdout


def test_the_engines_snippet_answers_and_prints_nothing():
    text = (ROOT / "docs" / "serving.md").read_text()
    snippet = re.search(r"## The engine\n\n```python\n(.*?)```", text, re.DOTALL)[1]
    done = run(snippet + '\nprint(sorted(events), len([e for e in events["a"] if e.token is not None]) > 1)')
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == "['a', 'b'] True\n"


def shell_lines(text: str) -> list[str]:
    """Lines of a document's blocks for a shell, fenced or indented."""
    fenced = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"^    .*", rest, re.MULTILINE)]).splitlines()


def test_notes_behind_commands_are_comments_of_the_shell():
    # Without the # a copied line ends in "'does' is not a flag", an open quote, or a second command behind a semicolon.
    for path in (ROOT / "README.md", ROOT / "WORKSPACE.md", *(ROOT / "docs").glob("*.md")):
        for line in shell_lines(path.read_text(encoding="utf-8")):
            if re.match(r"[\s$]*([A-Z_]+=\S+ )*(eval |\.venv/|tests/\w|python3? |make |bash |curl |docker )", line):
                command = re.sub(r"\s#.*", "", line)
                assert not re.search(r"\S\s{2,}\S", command), f"{path.name}: {line}"


def test_extras_are_installed_from_the_clone_and_exist():
    # The project is on no index: "pip install 'jaxbench[serve]'" would fetch what somebody else put under that name.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *sources("jaxbench", "experiments")]
    found = re.findall(r"pip install (?:-\S+ )*'?([\w.]*)\[([a-z,]+)\]", "\n".join(map(Path.read_text, texts)))
    assert len(found) > 15 and {name for name, _ in found} == {"."}
    assert {extra for _, names in found for extra in names.split(",")} <= set(extras)
