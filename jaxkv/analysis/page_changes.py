"""What a study's report says of changed caches: the statements over all runs, then run by run."""

from collections.abc import Mapping
from typing import Any

from jaxkv.analysis.accumulation_page import write_accumulation
from jaxkv.analysis.document import Block, Heading, Paragraph, Table
from jaxkv.analysis.injection_claims import NOT_RUN
from jaxkv.analysis.injection_page import write_injection
from jaxkv.analysis.perplexity import write_perplexity

Study = Mapping[str, Any]
SECTIONS = {
    "injection": ("Changed caches", "changed-caches", write_injection),
    "perplexity": ("Perplexity", "perplexity", write_perplexity),
    "accumulation": ("Quantized caches along a text", "accumulation", write_accumulation),
}
OTHERS = ("divergence", "attribution", "mitigations", "drift", "patching", "parity", "doctor", "foreign")
DIFFERS = "differs"
NOTE = (
    "Statements of the studies on changed caches (Shebel 2025; KVarN, arXiv 2606.03458), judged on each run that "
    "speaks to them; the figures stand with each run."
)


def changes_alone(study: Study) -> bool:
    """Whether all that was run changes a cache, so that nothing speaks to cached against uncached decoding."""
    conditions = study["conditions"]
    return any(c.get(name) for c in conditions for name in SECTIONS) and not any(
        c.get(name) for c in conditions for name in OTHERS
    )


def list_statements(study: Study) -> list[tuple[str, str, dict[str, list[str]]]]:
    """Each statement with its verdict, DIFFERS where runs do not agree, and the runs that have each verdict."""
    found: dict[str, dict[str, list[str]]] = {}
    for condition in study["conditions"]:
        for claim in (c for name in SECTIONS for c in (condition.get(name) or {}).get("claims", ())):
            if claim["verdict"] != NOT_RUN:
                runs = found.setdefault(f"{claim['id']}: {claim['claim']}", {})
                runs.setdefault(claim["verdict"], []).append(condition["name"])
    return [(text, next(iter(runs)) if len(runs) == 1 else DIFFERS, runs) for text, runs in sorted(found.items())]


def write_statements(study: Study) -> list[Block]:
    """The statements over all runs."""
    rows: list[list[str | tuple[str, ...]]] = [
        [text, verdict, tuple(f"{said}: {', '.join(names)}" for said, names in runs.items())]
        for text, verdict, runs in list_statements(study)
    ]
    if not rows:
        return []
    head = [] if changes_alone(study) else [Heading("Statements on changed caches", name="statements")]
    return [*head, Paragraph(NOTE, "note"), Table(["statement", "verdict", "runs"], rows, kind="claims")]


def write_changes(study: Study) -> list[Block]:
    """What changed caches do, run by run."""
    blocks: list[Block] = []
    for experiment, (title, name, write) in SECTIONS.items():
        conditions = [condition for condition in study["conditions"] if condition.get(experiment)]
        if conditions:
            blocks.append(Heading(title, name=name))
        for condition in conditions:
            blocks += [Heading(condition["name"], 3), *write(condition[experiment])]
    return blocks
