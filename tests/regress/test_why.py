"""Why a case became slower: a planted product is named by its function, a wait is said to be outside the programs."""

import pytest

from jaxbench.profiling import operations
from jaxbench.regress import report, why
from jaxbench.regress.judge import Finding
from jaxbench.regress.pairs import Launches
from jaxbench.regress.trees import here
from tests.regress.test_run import DECODE_HEAD, changed_tree, plan_of

FEED = "        return self.down_proj(functional.activated(gate, self.activation) * up)\n"
PLANTED = FEED.rstrip("\n") + " + wasted(x)\n\n\ndef wasted(x):\n    big = jnp.ones((x.shape[-1], 4096), x.dtype)\n"
PLANTED += "    for _ in range(6):\n        x = jnp.tanh(jnp.tanh(x @ big) @ big.T)\n    return x\n"


def worse(series, share):
    return Finding(series, "regression", "critical", share, share, share, 1.0, 1.0, 4, 0)


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """A head whose every token takes a wait and 72 products longer."""
    folder = tmp_path_factory.mktemp("why")
    head = changed_tree(folder / "head", "jaxbench/transformer.py", FEED, PLANTED)
    path = head.root / "jaxbench" / "sample.py"
    waiting = DECODE_HEAD + "        __import__('time').sleep(0.02)\n"
    path.write_text(path.read_text(encoding="utf-8").replace(DECODE_HEAD, waiting), encoding="utf-8")
    launches = Launches(plan_of(folder, base=here(), head=head), lambda text: None)
    found = [worse("decode.tokens_per_s", 2.0), worse("decode.decode.flops", 0.5), worse("start.import_s", 0.3)]
    return why.explain(launches, found, folder / "why"), folder / "why"


def test_the_functions_and_instructions_that_were_added_are_named(explained):
    found, folder = explained
    case = found["cases"]["decode"]
    assert "error" not in case and found["packages"] == {}
    decode = [each for each in case["operations"] if each["name"].startswith("decode: ") and "wasted" in each["name"]]
    assert decode and all(each["seconds"][0] == 0 and each["calls"][0] == 0 for each in decode)
    before, after = case["opcodes"]["decode"]["dot"]
    assert after - before == 2 * 6 * 2  # products, times, layers
    difference = (folder / "decode" / "decode.diff").read_text(encoding="utf-8")
    assert "wasted" in difference and "+" in difference


def test_a_wait_is_said_to_be_outside_the_programs(explained):
    case = explained[0]["cases"]["decode"]
    assert case["seconds"][1] - case["seconds"][0] > 5 * 0.02  # five tokens behind the first
    said = why.sentences(
        {"packages": {}, "cases": {"decode": case | {"seconds": [0.1, 0.3], "operations_s": [0.1, 0.12]}}}
    )
    assert any("+200 ms (100 to 300) under the profiler, its operations +20 ms" in line for line in said)
    assert any(line.endswith("most of it is outside the compiled programs") for line in said)


def test_stages_are_of_regressions_alone_and_words_follow_them(explained):
    findings = [
        worse("decode.trace_s", 0.4), worse("decode.tokens_per_s", 0.2), worse("decode.token_p50_s", 0.3),
        worse("train.step.flops", 0.1), worse("start.import_s", 0.5)._replace(verdict="undecided"),
    ]  # fmt: skip
    assert why.stages_of(findings) == {"decode": {"trace": 0.4, "run": 0.3}, "train": {}}
    said = why.sentences(
        {"packages": {"jax": ["0.9", "0.10"], "new": ["", "1"]}, "cases": {"decode": {"stages": {"trace": 0.4}}}}
    )
    assert said == ["packages: jax 0.9 to 0.10, new none to 1", "decode: slower in trace (+40 %)"]
    assert report.explanation({}) == []


def test_an_operation_has_moved_where_all_profiles_lie_apart():
    def profiles(*seconds):
        return [{"operations": {"decode: dot": (2, each)}} for each in seconds]

    assert why.moved(profiles(1.0, 2.0), profiles(1.9, 3.0), least=0.1) == []
    found = why.moved(profiles(1.0, 2.0), profiles(2.1, 3.0), least=0.1)
    assert found == [{"name": "decode: dot", "seconds": [1.5, 2.55], "calls": [2, 2]}]
    assert why.moved(profiles(1.0, 2.0), profiles(2.1, 3.0), least=2.0) == []
    gone = why.moved(profiles(1.0, 2.0), [{"operations": {}}, {"operations": {}}], least=0.1)
    assert gone[0]["seconds"] == [1.5, 0.0] and gone[0]["calls"] == [2, 0]


def test_a_case_that_fails_under_the_profiler_says_so(tmp_path):
    broken = changed_tree(tmp_path / "base", "jaxbench/sample.py", "    def compile(\n", "    def compile_before(\n")
    launches = Launches(plan_of(tmp_path, base=broken, head=here()), lambda text: None)
    found = why.explain(launches, [worse("decode.tokens_per_s", 0.2)], tmp_path / "why")
    assert "has no attribute 'compile'" in found["cases"]["decode"]["error"]
    assert any("no profile (base: " in line for line in why.sentences(found))


def test_instructions_are_named_by_primitive_and_function_and_without_one_by_shape():
    text = "\n".join([
        "HloModule jit_f, is_scheduled=true", "", "FileNames", '1 "/x/jaxbench/nn.py"', '2 "/y/jax/lax.py"',
        "FunctionNames", '1 "Block.attend"', '2 "<lambda>"', "FileLocations",
        "1 {file_name_id=1 function_name_id=1 line=5}", "2 {file_name_id=2 function_name_id=2 line=7}", "StackFrames",
        "1 {file_location_id=1 parent_frame_id=1}", "2 {file_location_id=2 parent_frame_id=1}", "",
        "ENTRY %main () -> f32[2] {", "  %p.1 = f32[2]{0} parameter(0)",
        '  %dot.7 = f32[2]{0} dot(%p.1, %p.1), metadata={op_name="jit(f)/dot_general" stack_frame_id=2}',
        "  %while.3 = (s32[], f32[2]{0}) while(%p.1), body=%b", "  ROOT %fusion.1 = f32[2]{0} fusion(%dot.7)", "}",
    ])  # fmt: skip
    program = operations.read_program(text)
    assert program.module == "jit_f" and program.opcodes == {"dot": 1, "while": 1, "fusion": 1}
    assert program.names["dot.7"] == "dot_general in Block.attend" and program.names["fusion.1"] == "fusion f32[2]"
    assert "while.3" not in program.names
    assert operations.instructions(text)[0] == "dot f32[2] dot_general in Block.attend"
