"""What runs stages in a test's own folder."""

import pytest

from jaxbench.gpu import run
from jaxbench.measure import records
from jaxbench.measure.records import RecordFile


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that runs stages; their commit is `commit` of its keywords."""

    def call(*stages, commit="abc", device="cpu", budget_s=3600.0, resume=False, is_rehearsal=True, at_once=1):
        monkeypatch.setattr(run.environment, "commit", lambda: commit)
        place = run.Place(device, is_rehearsal, tmp_path / "results", tmp_path / "work")
        return run.run(stages, place, budget_s=budget_s, resume=resume, say=said.append, at_once=at_once)

    said = call.said = []
    call.results = tmp_path / "results"
    call.kept = lambda: RecordFile(call.results / records.RESULTS_NAME).read()
    call.named = lambda: {each.arm: each for each in call.kept() if each.metric == run.STAGE}
    return call
