"""The reports of the experiments, by name, in the order in which a run's report shows them."""

from jaxkv.experiments.experiment import EXPERIMENTS, NAMES
from jaxkv.experiments.report_parts import Report

REPORTS: dict[str, Report] = {name: EXPERIMENTS[name].report for name in NAMES}
