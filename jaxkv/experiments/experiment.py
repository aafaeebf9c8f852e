"""The experiments of the command by name: what options may say beside each, and where its parts stand.

An experiment is a folder beside this file and a line in EXPERIMENTS. The folder has

    record.py  its record type, called NAMERecord;
    run.py     `make_runner`: runs a condition (jaxkv.experiments.driver), or `examine`: gives its one record;
    report.py  REPORT: what is said of its records.

A part is imported when it is asked for, so that records and reports are read without JAX.
"""

import dataclasses
import pkgutil
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxkv.config import Precision
    from jaxkv.experiments.driver import Condition, Examination, Runner
    from jaxkv.experiments.record_parts import Record
    from jaxkv.experiments.report_parts import Report
    from jaxkv.options import Options


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment, and what decides before anything slow whether it can be run as asked.

    Attributes:
      name: of its folder, and in its records.
      of: what it is run on. One of anything but problems is run by itself; one of elsewhere is not run here at all.
        Programs need a model's shapes, but no weights and no data; a device not even that.
      plain: whether it explains the plain regime, and has no aligned one.
      one_length: whether it sets rows beside rows at one padded length.
      policies: whether it compares precision policies of its own, so that its conditions have none.
      torch: whether it runs through transformers' PyTorch models instead of JAX's, or beside them.
      changes: the options of a changed cache that it takes.
    """

    name: str
    of: Literal["problems", "text", "programs", "device", "elsewhere"] = "problems"
    plain: bool = False
    one_length: bool = False
    policies: bool = False
    torch: Literal["instead", "beside"] | None = None
    changes: tuple[Literal["cache_error", "cache_quant", "error_seeds"], ...] = ()

    def _find(self, part: str) -> Any:
        return pkgutil.resolve_name(f"jaxkv.experiments.{self.name}.{part}")

    @property
    def record(self) -> "type[Record]":
        """The type of its records."""
        found: type[Record] = self._find(f"record:{self.name.capitalize()}Record")
        return found

    @property
    def report(self) -> "Report":
        """What is said of its records."""
        found: Report = self._find("report:REPORT")
        return found

    def make_runner(self, condition: "Condition") -> "Runner[Any, Any, Any]":
        """Runs it on a condition."""
        made: Runner[Any, Any, Any] = self._find("run:make_runner")(condition)
        return made

    def examine(self, options: "Options", precision: "Precision") -> "Examination":
        """Prepares it where it gives one record, without weights or problems. Raises UserError."""
        made: Examination = self._find("run:examine")(options, precision)
        return made


_ALL = (  # in the order in which a run's report shows them
    Experiment("divergence", torch="instead"),
    Experiment("attribution", plain=True, one_length=True),
    Experiment("mitigations", policies=True),
    Experiment("drift", one_length=True),
    Experiment("patching", plain=True, one_length=True),
    Experiment("parity", plain=True, one_length=True, torch="beside"),
    Experiment("perplexity", of="text", changes=("cache_error", "cache_quant", "error_seeds")),
    Experiment("injection", changes=("cache_error", "cache_quant", "error_seeds")),
    Experiment("accumulation", one_length=True, changes=("cache_quant",)),
    Experiment("lowering", of="programs"),
    Experiment("doctor", of="device"),
    Experiment("foreign", of="elsewhere"),
)
EXPERIMENTS = {one.name: one for one in _ALL}
NAMES = tuple(one.name for one in _ALL if one.of != "elsewhere")
CHANGING = tuple(one.name for one in _ALL if one.changes)
