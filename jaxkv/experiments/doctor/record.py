"""The record of experiment 'doctor': one examination of one device. Imports neither jax nor flax."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Count, Finite, require


class Figure(parts.Part, frozen=True):
    """What was compared; `differ` and `max_ulp` are None where an element is not finite."""

    elements: Annotated[int, Meta(gt=0)]
    nonfinite: Count
    differ: Count | None
    max_ulp: parts.Amount | None

    def __post_init__(self) -> None:
        differ, ulp = self.differ, self.max_ulp
        if self.nonfinite:
            told = "numbers that are not finite do not agree; expected null"
            require("differ", differ is None and ulp is None, told)
        else:
            told = f"expected count of at most {self.elements}, got {differ}"
            require("differ", differ is not None and differ <= self.elements, told)
            require("max_ulp", ulp is not None and not (ulp and not differ), f"{ulp} beside {differ} that differ")


Answers = dict[str, dict[str, Figure]]  # operation -> count -> figure


class Findings(parts.Part, frozen=True):
    """What was found in a dtype: the answers of eight questions, and more; what was not measured is absent or empty.

    `operand_bits` are of fp32 alone, by precision and row count. Of 16 bits alone are `sum_bits` (of exact and of
    rounded terms, by dtype of the result and row count) and `casts_dropped` (shares, by ours or default and where).
    """

    held: dict[str, str]  # dtypes of param, operand and activation on the device
    rows: Answers
    rows_from_most: Answers
    slots: Answers
    batch: Answers
    neighbours: Answers
    following: Answers
    rerun: Answers
    place: Answers
    process: dict[str, dict[str, bool]]  # operation -> row count -> whether another process has the same bits
    operand_bits: dict[str, dict[str, Finite | None]] | UnsetType = UNSET
    sum_bits: dict[str, dict[str, dict[str, Finite | None]]] | UnsetType = UNSET
    casts_dropped: dict[str, dict[str, Finite]] | UnsetType = UNSET


class Process(parts.Part, frozen=True):
    """Whether a second process could be asked, and why not."""

    status: Literal["ok", "cannot tell"]
    reason: str | None


class DoctorRecord(parts.Record, frozen=True):
    """One examination of one device."""

    KEY: ClassVar = ("kind",)

    device: dict[str, Any]  # platform, kind, runtime and whether memory was preallocated
    environment: dict[str, Any]  # of the process (jaxkv.provenance.environment)
    compiler_options: dict[str, Any]
    spec: dict[str, Any]  # what was asked (jaxkv.experiments.doctor.run.DoctorSpec)
    dtypes: dict[str, Findings]
    process: Process
    missing: dict[str, str]  # program -> why it was not run
    compilations: int
    compile_seconds: dict[str, Finite]
    seconds: Finite

    @property
    def kind(self) -> Any:
        """Of the device."""
        return self.device.get("kind")
