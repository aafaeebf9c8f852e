"""Claims of papers, judged on these runs: only where they are asked for, and worded as seen here or not."""

from collections.abc import Collection, Mapping, Sequence

from jaxkv.errors import UserError
from jaxkv.experiments.injection.claims import NOT_RUN
from jaxkv.overview.gather import Study, list_values
from jaxkv.reporting.document import Block, Cell, Claims, Fold, Heading, Paragraph, Table
from jaxkv.reporting.rules import CANNOT_TELL, DOES_NOT_HOLD, HOLDS, say_family, write_rules

# What may be asked for, and the letter that its claims' ids begin with.
PAPERS = {"2604.15409": "C", "2606.03458": "K", "shebel-2025": "E"}
CHANGED = ("injection", "perplexity", "accumulation")  # experiments that change the cache
SEEN = {"reproduced": True, HOLDS: True, "not reproduced": False, DOES_NOT_HOLD: False}
DIFFERS = "differs"


def read_asked(text: str) -> tuple[str, ...]:
    """Papers named with commas between them. Raises UserError on another name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if odd := [name for name in names if name not in PAPERS]:
        raise UserError(f"no claims of '{odd[0]}' are known; name some of {', '.join(PAPERS)}")
    return names


def keep_claims(blocks: Sequence[Block], asked: Collection[str]) -> list[Block]:
    """The blocks without claims of papers that nobody asked for."""
    return [block for block in blocks if not isinstance(block, Claims) or block.paper in asked]


def say_verdict(verdict: str, models: Sequence[str]) -> str:
    """``seen``, ``not seen on MODEL``, ``cannot tell``; what runs decide otherwise stays as it is."""
    word, *some = verdict.partition(" on ")
    if word not in SEEN:
        return verdict
    return ("seen" if SEEN[word] else f"not seen on {', '.join(models)}") + "".join(some)


def list_statements(study: Study) -> list[tuple[str, str, dict[str, list[str]]]]:
    """Each statement on changed caches with what its runs say together, and the runs that have each verdict.

    Together they say DIFFERS where it holds on some and does not on others, and how many decide it where not all do.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for condition in study["conditions"]:
        for claim in (c for name in CHANGED for c in (condition.get(name) or {}).get("claims", ())):
            if claim["verdict"] != NOT_RUN:
                runs = found.setdefault(f"{claim['id']}: {claim['claim']}", {})
                runs.setdefault(claim["verdict"], []).append(condition["name"])
    return [(text, _sum_up(runs), runs) for text, runs in sorted(found.items())]


def _sum_up(runs: Mapping[str, Sequence[str]]) -> str:
    decided = [verdict for verdict in (HOLDS, DOES_NOT_HOLD) if verdict in runs]
    if len(decided) > 1:
        return DIFFERS
    (verdict,) = decided or (CANNOT_TELL,)
    total = sum(map(len, runs.values()))
    return verdict if len(runs[verdict]) == total else f"{verdict} on {len(runs[verdict])} of {total}"


def write_claims(study: Study, asked: Collection[str]) -> list[Block]:
    """What each claim is found to be, its details behind a line; nothing where nobody asked."""
    models = list_values(study["conditions"], "model")
    blocks: list[Block] = []
    if "2604.15409" in asked:
        details: list[list[Cell]] = [
            [f"{c['id']}: {c['claim']}", say_verdict(c["verdict"], models), tuple(c["figure"]), tuple(c["control"])]
            for c in study["claims"]
        ]
        text = f"Claims of arXiv 2604.15409, on the models and devices of these {len(study['conditions'])} runs."
        blocks += [
            Paragraph(f"{text} {say_family(study['claims'])}", "note"),
            Table(["claim", "here"], [row[:2] for row in details], kind="claims"),
            Fold("What each rests on", [Table(["claim", "here", "figure", "control"], details, kind="claims")]),
            *write_rules([claim["id"] for claim in study["claims"]]),
        ]
    letters = {PAPERS[name] for name in asked}
    statements = [found for found in list_statements(study) if found[0][0] in letters]
    if statements:
        rows: list[list[Cell]] = [[text, say_verdict(verdict, models)] for text, verdict, _ in statements]
        runs: list[list[Cell]] = [
            [text, tuple(f"{said}: {', '.join(n)}" for said, n in by.items())] for text, _, by in statements
        ]
        text = "Statements on changed caches, judged on each run that speaks to them; the figures stand with each run."
        blocks += [
            Paragraph(text, "note"),
            Table(["statement", "here"], rows, kind="claims"),
            Fold("Which run says what", [Table(["statement", "runs"], runs, kind="wrap")]),
        ]
    return [Heading("Claims of papers", name="claims"), *blocks] if blocks else []


def list_verdicts(study: Study, asked: Collection[str]) -> list[Block]:
    """The same for a terminal."""
    return [block for block in write_claims(study, asked) if isinstance(block, Table)]
