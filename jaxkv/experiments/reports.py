"""The reports of the experiments, by name, in the order in which a run's report shows them."""

from jaxkv.experiments.accumulation import report as accumulation
from jaxkv.experiments.attribution import report as attribution
from jaxkv.experiments.divergence import report as divergence
from jaxkv.experiments.doctor import report as doctor
from jaxkv.experiments.drift import report as drift
from jaxkv.experiments.injection import report as injection
from jaxkv.experiments.mitigations import report as mitigations
from jaxkv.experiments.parity import report as parity
from jaxkv.experiments.patching import report as patching
from jaxkv.experiments.perplexity import report as perplexity
from jaxkv.experiments.report_parts import Report

REPORTS: dict[str, Report] = {
    "divergence": divergence.REPORT,
    "attribution": attribution.REPORT,
    "mitigations": mitigations.REPORT,
    "drift": drift.REPORT,
    "patching": patching.REPORT,
    "parity": parity.REPORT,
    "perplexity": perplexity.REPORT,
    "injection": injection.REPORT,
    "accumulation": accumulation.REPORT,
    "doctor": doctor.REPORT,
}
