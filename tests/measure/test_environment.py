"""What a result came from: the code, with every change of it and nothing else."""

import subprocess

import pytest

from jaxbench.measure import environment


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A git repository with one file of code and one document, in place of this one."""
    (tmp_path / "jaxbench").mkdir()
    (tmp_path / "jaxbench" / "a.py").write_text("a = 1\n")
    (tmp_path / "README.md").write_text("text\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def git(tree, *arguments):
    subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True)


def commit_all(tree):
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first")


def test_the_commit_says_what_code_it_is(tree):
    commit_all(tree)
    clean = environment.commit()
    assert len(clean) == 12
    (tree / "README.md").write_text("other text\n")
    assert environment.commit() == clean
    found = {clean}
    for name, content in (("a.py", "a = 2\n"), ("a.py", "a = 3\n"), ("b.py", "b = 1\n"), ("b.py", "b = 2\n"),
                          ("k.h", "1\n"), ("k.h", "2\n"), ("k.c", "1\n")):  # fmt: skip
        (tree / "jaxbench" / name).write_text(content)
        assert environment.commit().startswith(f"{clean}+")
        found.add(environment.commit())
    assert len(found) == 8 and environment.commit() in found


def test_outside_git_the_sources_say_it(tree):
    first = environment.commit()
    assert first.startswith("sources-") and environment.commit() == first
    found = {"", first}
    for name in ("a.py", "kernel.c", "kernel.h"):
        (tree / "jaxbench" / name).write_text("a = 2\n")
        found.add(environment.commit())
    assert len(found) == 5


def test_versions_name_what_a_gpus_kernels_come_from(monkeypatch):
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: f"{name}!")
    found = environment.versions()
    assert {"jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "triton"} <= set(found)
