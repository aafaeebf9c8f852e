"""The record type of every experiment by its name. Imports neither jax nor flax."""

from jaxkv.experiments.accumulation.record import AccumulationRecord
from jaxkv.experiments.attribution.record import AttributionRecord
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.doctor.record import DoctorRecord
from jaxkv.experiments.drift.record import DriftRecord
from jaxkv.experiments.foreign.record import ForeignRecord
from jaxkv.experiments.injection.record import InjectionRecord
from jaxkv.experiments.mitigations.record import MitigationsRecord
from jaxkv.experiments.parity.record import ParityRecord
from jaxkv.experiments.patching.record import PatchingRecord
from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import Record

KINDS: tuple[type[Record], ...] = (
    AccumulationRecord,
    AttributionRecord,
    DivergenceRecord,
    DoctorRecord,
    DriftRecord,
    ForeignRecord,
    InjectionRecord,
    MitigationsRecord,
    ParityRecord,
    PatchingRecord,
    PerplexityRecord,
)
RECORDS = {str(kind.__struct_config__.tag): kind for kind in KINDS}
