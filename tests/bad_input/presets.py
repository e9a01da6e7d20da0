"""Bad input of presets.py: names, and files of settings."""

from __future__ import annotations

from tests.bad_input.harness import Case, case_of

GOOD = {
    "name": "A_B", "kind": "variable", "value": "'1'", "framework": "jax", "about": "a", "source": "'https://x'",
}  # fmt: skip


def yaml_of(**changes: str | None) -> str:
    """Text of a preset with one setting, some of whose fields are changed or left out."""
    setting = ", ".join(f"{name}: {value}" for name, value in (GOOD | changes).items() if value is not None)
    return f"device: cpu\nabout: a\nsettings: [{{{setting}}}]\n"


def named(text: str, *wanted: str) -> list[Case]:
    """Cases of a file, for each command that reads one."""
    commands = ("show", "export", "check")
    return [case_of(("presets.py", command), "--name=p.yaml", "p.yaml", *wanted, p_yaml=text) for command in commands]


FILES = {
    "": (),
    "device: [": (),
    "- a\n": (),
    "about: a\nsettings: []\n": ("device",),
    "device: fpga\nabout: a\nsettings: []\n": ("device", "fpga"),
    "device: cpu\nabout: a\nsettings: []\n": ("settings",),
    "device: cpu\nabout: ''\nsettings: []\n": ("about",),
    yaml_of(kind="magic"): ("kind", "magic"),
    yaml_of(framework="mxnet"): ("framework", "mxnet"),
    yaml_of(source="hearsay"): ("source", "hearsay"),
    yaml_of(source=None): ("source",),
    yaml_of(name="'A B'"): ("name", "A B"),
    yaml_of(value=None): ("value",),
    yaml_of(is_default="maybe"): ("is_default", "maybe"),
    yaml_of(valu="1"): ("settings.0.valu", "the nearest is settings.value"),
    yaml_of().replace("]", "") + ", " + yaml_of().partition("[")[2]: ("A_B is there twice",),
}
CASES = [
    Case("presets.py lst", ("'lst' is no command", "nearest is list")),
    Case("presets.py list x", ("'x' is not a flag",)),
    Case("presets.py show", ("--name",)),
    Case("presets.py export", ("--name",)),
    Case("presets.py check", ("--name",)),
    Case(
        "presets.py show --name=voodoo", ("--name=voodoo is no preset", "wanted one of amd, apple, intel, nvidia, tpu")
    ),
    Case("presets.py show --name=", ("--name= is no preset",)),
    Case("presets.py show --name=none.yaml", ("none.yaml",)),
    Case("presets.py show --name=../lm/tiny", ("../lm/tiny",)),
    Case("presets.py show --nam=nvidia", ("--nam", "nearest is --name")),
    Case("presets.py export --name=nvidia --all=maybe", ("--all", "maybe")),
    *(case for text, wanted in FILES.items() for case in named(text, *wanted)),
]
