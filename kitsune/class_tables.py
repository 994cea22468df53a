"""Class tables: the time of a step by class of kernels, as given and under a plan, as records that can be stored."""

from typing import Annotated

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.timeline import MAX_CLASSES, MAX_TOLD, ClassTime

MAX_NOTES = 40

Told = Annotated[str, Field(max_length=MAX_TOLD)]


class ClassTable(Record):
    """The launches of a step by class of kernels, or why there are none."""

    classes: tuple[ClassTime, ...] = Field(
        default=(),
        max_length=MAX_CLASSES,
        description="[class of kernels, launches, us in all, least us that the device allows], each launch alone",
    )
    notes: tuple[Told, ...] = Field(default=(), max_length=MAX_NOTES, description="how the recorded step differs")
    missing: Told = Field(default="", description="why there are no classes, as the end of a sentence")


class ClassTables(Record):
    """The step as given, and under the plan. Of a plan without choices both are the same."""

    given: ClassTable
    plan: ClassTable
