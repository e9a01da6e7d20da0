"""Compute rates, seconds and units from a workload's samples; one rule for every arm (S file)."""

from __future__ import annotations

from jaxbench.measure.records import Workload


def rates(workload: Workload, answers: list[dict]) -> dict[str, list[float]]:
    """Return rates by metric, one value per sample, from the workers' seconds; the same rule for every arm."""
    prompt_tokens = workload.batch * workload.prompt_tokens
    if workload.kind == "train":
        return {"train_tokens_per_s": [prompt_tokens / answer["step_s"] for answer in answers]}
    first = [answer["first_s"] for answer in answers if "first_s" in answer]
    if workload.kind == "prefill":
        return {"prefill_tokens_per_s": [prompt_tokens / seconds for seconds in first]}
    steps = workload.new_tokens - 1
    decode = [workload.batch * steps / answer["rest_s"] for answer in answers]
    return ({"first_token_s": first} if first else {}) | {"decode_tokens_per_s": decode}


def tokens_of(workload: Workload) -> int:
    """Number of tokens of one sample: trained on, in the prompts, or generated."""
    return workload.batch * (workload.new_tokens or workload.prompt_tokens)


def seconds_of(answer: dict) -> tuple[float, ...]:
    """Seconds of one sample: of the first token and of the rest, or of a training step."""
    return (answer["step_s"],) if "step_s" in answer else (answer.get("first_s", 0.0), answer["rest_s"])


def main_metric(workload: Workload) -> str:
    """Name of the main rate of a workload."""
    return f"{workload.kind}_tokens_per_s"


def unit_of(metric: str) -> str:
    """Unit of an arm's metric, read from the end of its name."""
    if metric.startswith("train_mfu"):
        return "share"
    return {"flops": "FLOP", "per_s": "tokens/s", "bytes": "bytes", "token": "J/token"}.get(metric[-5:], "s")
