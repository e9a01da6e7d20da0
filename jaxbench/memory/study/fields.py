"""Field types of the settings that measure memories, with their limits (S file)."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from jaxbench.memory.study.tasks import HELD_OUT

Item = TypeVar("Item")


def _different(values: tuple[Item, ...]) -> tuple[Item, ...]:
    # Not a Field(min_length=1), which also complains about a list whose only item is wrong.
    if not values:
        raise ValueError(f"{list(values)} is empty, wanted at least one")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{value} is given twice")
    return values


Several = Annotated[tuple[Item, ...], AfterValidator(_different)]  # at least one, all different
Length = Annotated[int, Field(ge=1, le=2**24)]  # tokens of a row
Seed = Annotated[int, Field(ge=0, lt=HELD_OUT)]  # larger seeds are held out: no run is trained on their rows
Rate = Annotated[float, Field(gt=0)]  # peak learning rate
