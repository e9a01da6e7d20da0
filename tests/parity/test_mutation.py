"""Gate P9: the parity gates are tested by injecting bugs, and must catch every one."""

import functools

import pytest

from jaxbench.parity import capture, cases, evidence, mutation, run, step_bugs

# One minute of work, on a machine that may be shared by fifteen
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("plain_codegen")]


@pytest.fixture(scope="module")
def outcomes(plain_codegen):
    return {outcome.name: outcome for outcome in mutation.score()}


def test_the_float64_gates_catch_every_injected_bug(outcomes):
    missed = [m.name for m in mutation.MUTATIONS if not outcomes[m.name].is_caught]
    assert missed == []


def test_no_gate_fails_on_the_twins_as_they_are(outcomes):
    clean = {name: outcome for name, outcome in outcomes.items() if name.startswith("none")}
    assert len(clean) == len({(m.case, m.side) for m in mutation.MUTATIONS})
    assert [name for name, outcome in clean.items() if outcome.is_caught] == []


def test_the_score_is_a_gate(outcomes):
    gate = mutation.gate(list(outcomes.values()))
    assert gate.passed and gate.note == f"{len(mutation.MUTATIONS)} of {len(mutation.MUTATIONS)} injected bugs caught"
    missed = [*outcomes.values(), mutation.Outcome("new-bug", ())]
    assert not mutation.gate(missed).passed and mutation.gate(missed).where == "new-bug"
    alarm = [*outcomes.values(), mutation.Outcome("none (again)", ("P1",))]
    assert mutation.gate(alarm).where == "none (again)"


def test_bugs_of_the_optimiser_show_in_training_alone(outcomes):
    for name in ("adam-eps-inside-root", "adam-eps-1e-6", "l2-for-decoupled-decay", "no-decay-on-norms"):
        gates = outcomes[name].caught_by
        assert all("after" in gate or "training" in gate for gate in gates) and gates


def test_bugs_of_a_runs_step_show_in_training_alone(outcomes):
    """Clipping, micro-batches and the choice of what decays, which a plain AdamW step does not have."""
    for bug in step_bugs.STEP_BUGS:
        gates = outcomes[bug.name].caught_by
        assert gates and all("after" in gate or "training" in gate for gate in gates)


def test_a_gradient_that_is_lost_shows_though_every_output_is_right(outcomes):
    gates = outcomes["tied-head-passes-no-gradient"].caught_by
    assert "P1 gradients, float64" in gates and "P1 outputs, float64" not in gates


def test_a_decoding_bug_shows_though_the_full_call_is_right(outcomes):
    gates = outcomes["decode-position-one-late"].caught_by
    assert "P8 torch: cached decode = full call" in gates and "P1 outputs, float64" not in gates


def test_bugs_in_shared_files_are_caught_by_outside_oracles(outcomes):
    shared = [m for m in mutation.MUTATIONS if m.side == "shared" and not m.case.startswith("hallucination/")]
    assert len(shared) >= 20 and all(m.case.startswith("oracle/") for m in shared)
    for bug in shared:
        assert outcomes[bug.name].caught_by and all(gate.startswith("P11 ") for gate in outcomes[bug.name].caught_by)


def test_bugs_of_equinox_are_caught_though_flax_is_right(outcomes):
    own = [m for m in mutation.MUTATIONS if m.side == "equinox"]
    assert len(own) >= 5
    assert outcomes["equinox-tied-head-passes-no-gradient"].caught_by == ("P1 gradients, float64",)
    decoding = outcomes["equinox-decode-position-one-late"].caught_by
    assert "P8 equinox: cached decode = full call" in decoding and "P1 outputs, float64" not in decoding


def test_every_bug_has_a_name_of_its_own():
    assert len({m.name for m in mutation.MUTATIONS}) == len(mutation.MUTATIONS)


BLAMED = [m for m in mutation.MUTATIONS if m.module]


@functools.cache
def right_side(case_id, twin):
    """Return the side without a bug, built once: its teacher-forced program takes the twin's tensors as arguments."""
    case = cases.find(case_id)
    config, params = cases.load(case)
    backend = "flax" if twin == "torch" else twin
    with run.pinned("float64"):
        return run.sides(case, config, params, dtype="float64", backend=backend)[int(twin != "torch")]


@pytest.mark.parametrize("bug", BLAMED, ids=lambda bug: bug.name)
def test_teacher_forcing_blames_the_module_that_has_the_bug(bug):
    case = cases.find(bug.case)
    config, params = cases.load(case)
    arrays = cases.arrays(case, config)
    right = right_side(bug.case, bug.side)
    with bug.injected(), run.pinned("float64"):
        backend = "flax" if bug.side == "torch" else bug.side
        wrong = run.sides(case, config, params, dtype="float64", backend=backend)[int(bug.side == "torch")]
        jax_side, torch_side = (right, wrong) if bug.side == "torch" else (wrong, right)
        calls = torch_side.calls(arrays, seed=evidence.SEED)
        forced = jax_side.forced(arrays, calls, seed=evidence.SEED)
        culprit = capture.blame(capture.local_errors(forced, calls), tolerance=1e-9)
    assert culprit is not None and culprit.module == bug.module
