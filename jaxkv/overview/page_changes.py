"""What a study's report says of changed caches: the statements over all runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.injection.claims import NOT_RUN
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.study import OTHERS
from jaxkv.reporting.rules import CANNOT_TELL, DOES_NOT_HOLD, HOLDS

Study = Mapping[str, Any]
SECTIONS = ("injection", "perplexity", "accumulation")
DECIDED = (HOLDS, DOES_NOT_HOLD)
DIFFERS = "differs"
METHOD = (
    "The clean arm decodes with its cache as it is. A changed arm has the same weights, tokens and sampler noise and "
    "another cache: it first follows the clean arm's tokens (KL, agreement), then runs freely (scores, tokens).",
    "Perplexity feeds the text's own tokens one by one through the cache. Along a text, `static` hands every layer "
    "the clean run's inputs, `accumulated` runs blocks of tokens, `decode` one token at a time.",
    "Intervals are 95 %, over problems with all their seeds. A count of zero stands with the one-sided 95 % bound "
    "of the share of problems.",
    "A sample in which a number was not finite is invalid and enters no figure.",
    "A verdict speaks of this model, task, device and version. Those of one run hold their 5 % together (Holm), each "
    "run for itself: over several runs more may be wrong.",
    "Runs of one condition that differ in their changes are joined; what they share is the same in each, bit for bit.",
)


def changes_alone(study: Study) -> bool:
    """Whether all that was run changes a cache, so that nothing speaks to cached against uncached decoding."""
    conditions = study["conditions"]
    others = {*REPORTS, *OTHERS} - set(SECTIONS)
    return any(map(_changes, conditions)) and not any(c.get(name) for c in conditions for name in others)


def _changes(condition: Mapping[str, Any]) -> bool:
    """Whether a run changes its cache; perplexity may be of the clean one alone."""
    texts = (condition.get("perplexity") or {}).get("changes", ())
    return bool(condition.get("injection") or condition.get("accumulation")) or any(
        entry["change"] != CLEAN for entry in texts
    )


def list_statements(study: Study) -> list[tuple[str, str, dict[str, list[str]]]]:
    """Each statement with what its runs say together, and the runs that have each verdict.

    Together they say DIFFERS where it holds on some and does not on others, and how many decide it where not all do.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for condition in study["conditions"]:
        for claim in (c for name in SECTIONS for c in (condition.get(name) or {}).get("claims", ())):
            if claim["verdict"] != NOT_RUN:
                runs = found.setdefault(f"{claim['id']}: {claim['claim']}", {})
                runs.setdefault(claim["verdict"], []).append(condition["name"])
    return [(text, _sum_up(runs), runs) for text, runs in sorted(found.items())]


def _sum_up(runs: Mapping[str, Sequence[str]]) -> str:
    decided = [verdict for verdict in DECIDED if verdict in runs]
    if len(decided) > 1:
        return DIFFERS
    (verdict,) = decided or (CANNOT_TELL,)
    total = sum(map(len, runs.values()))
    return verdict if len(runs[verdict]) == total else f"{verdict} on {len(runs[verdict])} of {total}"
