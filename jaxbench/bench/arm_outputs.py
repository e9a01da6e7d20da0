"""What the timed samples of one launch's arms gave, and the records of how arms differ (S file).

Tokens are compared of every sample: an arm's first output, and the first later one that differs from it. Of the train
step the losses of the first steps are compared, from the warm-up on. All steps train on the same rows, so the loss of
the second step depends on the gradients and the update of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxbench.bench import agreement
from jaxbench.bench.arms import arm_table
from jaxbench.bench.plan import Plan
from jaxbench.measure.records import Workload

STEPS = 2  # whose losses are compared
Output = list[list]  # tokens of each row, or one row of losses


class ArmOutputs:
    """Outputs by workload and arm.

    Args:
      plan: of the run.
      logits: returns an arm's next-token logits [V] after a row's tokens, None if it cannot.
    """

    def __init__(self, plan: Plan, logits: Callable[[str, list[int]], Sequence[float] | None]):
        self.plan, self.logits = plan, logits
        self.outputs: dict[Workload, dict[str, list[Output]]] = defaultdict(dict)  # one, or two that differ

    def note(self, arm: str, workload: Workload, answer: dict[str, Any]) -> None:
        """Keep what is compared of one sample's answer, in the order of the samples."""
        kept = self.outputs[workload]
        if workload.kind == "train":
            [losses] = kept.setdefault(arm, [[[]]])[0]
            losses += [answer["loss"]] * (len(losses) < STEPS)
        elif "tokens" in answer:
            outputs = kept.setdefault(arm, [answer["tokens"]])
            if len(outputs) == 1 and answer["tokens"] != outputs[0]:
                outputs.append(answer["tokens"])

    def compared(self, workload: Workload) -> Iterator[tuple[str, bool, dict[str, Any]]]:
        """Yield each arm, whether its outputs equal the first one of the baseline, and the detail of its record."""
        outputs, base = self.outputs.get(workload, {}), self.plan.suite.verdicts.baseline
        reference = base if base in outputs else next(iter(outputs), None)
        for arm, own in outputs.items():
            found = [self._detail(workload, reference, arm, outputs[reference][0], output) for output in own]
            different = [detail for detail in found if detail["first_difference"] is not None]
            unexcused = [detail for detail in different if not detail.get("near_tie")]
            yield arm, not different, (unexcused or different or found)[0]

    def _detail(self, workload: Workload, reference: str, arm: str, theirs: Output, ours: Output) -> dict[str, Any]:
        """Compare one output with the reference's: digest, first difference, and what decides whether it counts."""
        is_train = workload.kind == "train"
        if is_train:  # an arm that failed took fewer steps
            count = min(len(theirs[0]), len(ours[0]))
            theirs, ours = ([output[0][:count]] for output in (theirs, ours))
        places = agreement.differences(
            theirs, ours, tolerance=agreement.LOSS_TOLERANCE[workload.dtype] if is_train else 0.0
        )
        detail = {"digest": agreement.digest(ours if places else theirs), "reference": reference}
        detail["first_difference"] = places[0] if places else None
        if is_train:
            step = places[0][1] if places else 0
            return detail | {"loss": ours[0][step], "reference_loss": theirs[0][step]}
        if not places:
            return detail

        own_weights = arm_table.names("has_own_weights")
        # Rounding is what two arms differ by, also where the baseline differs from itself.
        others = [name for name in self.outputs[workload] if name != reference and name not in own_weights]
        second = (others or [arm])[0] if arm == reference else arm

        def logits_at(row: int, step: int) -> list[Sequence[float]] | None:
            context = self.plan.inputs[workload][row] + theirs[row][:step]
            found = [self.logits(name, context) for name in (reference, second)]
            return None if None in found else found

        is_narrow = workload.dtype != "float32" or {arm, reference} & set(own_weights)
        return detail | agreement.deciding_difference(theirs, ours, places, None if is_narrow else logits_at)
