"""The tables of a page on changed caches, from the summaries kept beside it.

python analysis/injection.py analysis/injection/README.md

rewrites what stands between `<!-- NAME -->` and `<!-- end -->`, NAME being runs, seed, claims, kl, pairs, methods,
bits, perplexity, accumulation or accumulated; the last three are of the folders `perplexity` and `accumulation` beside
the page's own. `<!-- NAME of PART -->` takes only files whose names have PART in them.
"""

import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxkv.analysis.accumulation_page import show_figures
from jaxkv.analysis.format import format_number, format_percent, format_share
from jaxkv.analysis.injection_claims import PAIRS
from jaxkv.analysis.injection_page import SEED_TABLE, show_kl, show_of_control, show_score
from jaxkv.schema_injection import CLEAN

Summary = Mapping[str, Any]
Kept = dict[str, Summary]  # by model
MARKED = re.compile(r"(<!-- (\w+)(?: of (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read(directory: pathlib.Path, kind: str, part: str = "") -> Kept:
    """The kept runs of a kind with `part` in their names, DEVICE_KIND-MODEL.json, by model."""
    paths = [path for path in sorted(directory.glob(f"*_{kind}-*.json")) if part in path.stem]
    return {path.stem.split(f"_{kind}-", 1)[1]: json.loads(path.read_text()) for path in paths}


def _entry(kept: Summary, change: str) -> Summary | None:
    return next((entry for entry in kept["summary"]["changes"] if entry["change"] == change), None)


def _show(kept: Summary, change: str, show: Callable[[Summary, str], str]) -> str:
    """A cell of a change by the run's main scorer; ``-`` where it was not run."""
    entry = _entry(kept, change)
    return show(entry, kept["summary"]["primary"]) if entry else "-"


def _kl(kept: Summary, change: str) -> str:
    return _show(kept, change, lambda entry, _: show_kl(entry))


def write_seed(directory: pathlib.Path, part: str) -> str:
    """The seed study's shares of control beside those of the runs."""
    runs, (_, ifeval, strings) = read(directory, "seed", part), SEED_TABLE[CLEAN]
    rows = []
    for change, (label, score, guessed) in SEED_TABLE.items():
        cells = [label, f"{100 * score / ifeval:.0f}", f"{100 * guessed / strings:.0f}"]
        show = show_score if change == CLEAN else show_of_control
        cells += [_show(kept, change, show) for kept in runs.values()]
        rows.append(cells)
    rows[0][1:3] = [f"{100 * ifeval:.0f} % right", f"{strings} % right"]
    rows[0][3:] = [f"{cell} % right" for cell in rows[0][3:]]
    return write_table(["", "seed: IFEval, % of control", "seed: next string, % of control", *runs], rows)


def write_kl(directory: pathlib.Path, part: str) -> str:
    """Every error: share of control and KL by model."""
    runs = read(directory, "seed", part)
    changes = dict.fromkeys(entry["change"] for kept in runs.values() for entry in kept["summary"]["changes"])
    head = ["change", *(f"{model}: {text}" for model in runs for text in ("% of control", "KL, nats", "agreement"))]
    rows = []
    for change in changes:
        cells = [f"`{change}`"]
        for kept in runs.values():
            agreement = _show(kept, change, lambda entry, _: format_share(entry["agreement"]))
            cells += [_show(kept, change, show_of_control), _kl(kept, change), agreement]
        rows.append(cells)
    return write_table(head, [row for row in rows if row[0] != f"`{CLEAN}`"])


def _write_verdicts(verdicts: Mapping[str, Mapping[str, str]]) -> str:
    models = list(dict.fromkeys(model for found in verdicts.values() for model in found))
    rows = ([statement, *(found.get(model, "not run") for model in models)] for statement, found in verdicts.items())
    return write_table(["statement", *models], rows)


def write_claims(directory: pathlib.Path, part: str) -> str:
    """The studies' statements: a verdict for each model, those on methods (E6) from the runs of quantizers."""
    verdicts: dict[str, dict[str, str]] = {}
    for kind in ("seed", "quants"):
        for model, kept in read(directory, kind, part).items():
            for claim in kept["summary"]["claims"]:
                if claim["id"].startswith("E6") == (kind == "quants"):
                    statement = f"{claim['id']}: {claim['claim']}"
                    verdicts.setdefault(statement, {})[model] = claim["verdict"]
    return _write_verdicts(verdicts)


def _difference(found: Summary | None) -> str:
    if not found:
        return "-"
    mean, *ends = map(format_number, (found["mean"], *(found["interval"] or ())))
    return mean + (" [{}, {}]".format(*ends) if ends else "")


def _write_pairs(runs: Kept, head: Sequence[str], name: Callable[[Summary], Sequence[str]]) -> str:
    rows: dict[tuple[str, ...], dict[str, Summary]] = {}
    for model, kept in runs.items():
        for pair in kept["summary"]["pairs"]:
            rows.setdefault(tuple(name(pair)), {})[model] = pair
    measures = {"score": "score", "kl": "KL, nats"}
    lines = [
        [*names, *(_difference(found[model][m] if model in found else None) for model in runs for m in measures)]
        for names, found in rows.items()
    ]
    return write_table([*head, *(f"{model}: {text}" for model in runs for text in measures.values())], lines)


def write_pairs(directory: pathlib.Path, part: str) -> str:
    """Errors that differ in one thing, first minus second."""
    head = ["what differs", "first", "second"]
    name = lambda pair: (PAIRS[pair["kind"]], f"`{pair['first']}`", f"`{pair['second']}`")  # noqa: E731
    return _write_pairs(read(directory, "seed", part), head, name)


def write_methods(directory: pathlib.Path, part: str) -> str:
    """Methods of 2-bit codes, each minus KVarN."""
    head = ["method", "minus"]
    name = lambda pair: (f"`{pair['first']}`", f"`{pair['second']}`")  # noqa: E731
    return _write_pairs(read(directory, "quants", part), head, name)


def write_bits(directory: pathlib.Path, part: str) -> str:
    """Every quantizer by the bits of its cache: share of control and KL by model."""
    runs = read(directory, "quants", part)
    specs: dict[str, Summary] = {}
    for kept in runs.values():
        specs |= {e["change"]: e for e in kept["summary"]["changes"] if e["spec"] and e["cache"]}
    order = sorted(specs, key=lambda change: -specs[change]["cache"]["bits"])
    head = ["change", "bits, K / V", "bits, whole cache", "packed, %"]
    head += [f"{model}: {text}" for model in runs for text in ("% of control", "KL, nats")]
    rows = []
    for change in order:
        entry = specs[change]
        body = " / ".join(format_number(entry["spec"][s]["bits"], 4) if entry["spec"][s] else "16" for s in ("k", "v"))
        cells = [
            f"`{change}`",
            body,
            format_number(entry["cache"]["bits"], 3),
            format_percent(entry["cache"]["packed"]),
        ]
        for kept in runs.values():
            cells += [_show(kept, change, show_of_control), _kl(kept, change)]
        rows.append(cells)
    return write_table(head, rows)


def write_perplexity(directory: pathlib.Path, part: str) -> str:
    """A text's perplexity through every changed cache, worst first by the model that bears it best."""
    runs: dict[str, dict[str, Summary]] = {}
    for kind in ("seed", "quants"):
        for model, kept in read(directory.parent / "perplexity", kind, part).items():
            runs.setdefault(model, {}).update({entry["change"]: entry for entry in kept["summary"]["changes"]})
    figures = ("bits, whole cache", "perplexity", "cached / uncached", "KL, nats", "flips")
    head = ["change", *(f"{model}: {figure}" for model in runs for figure in figures)]

    def worst(change: str) -> float:
        return -min(found[change].get("kl", math.inf) for found in runs.values() if change in found)

    changes = dict.fromkeys(change for found in runs.values() for change in found)
    rows = [
        [f"`{change}`", *(cell for found in runs.values() for cell in _perplexity(found.get(change)))]
        for change in sorted(changes, key=worst)
    ]
    return write_table(head, rows)


def _perplexity(entry: Summary | None) -> list[str]:
    if not entry or not entry["windows"]:
        return ["-"] * 5
    mean, *ends = (f"{value:.5g}" for value in (entry["ratio"]["mean"], *(entry["ratio"]["interval"] or ())))
    return [
        format_number(entry["cache"]["bits"], 3),
        format_number(entry["cached"]["perplexity"], 4),
        mean + (" [{}, {}]".format(*ends) if ends else ""),
        format_number(entry["kl"]),
        format_share(entry["flips"]),
    ]


def read_accumulation(directory: pathlib.Path, part: str) -> Kept:
    """The kept runs of the folder `accumulation` beside a page's own with `part` in their names, by model."""
    paths = [path for path in sorted((directory.parent / "accumulation").glob("*.json")) if part in path.stem]
    return {path.stem.split("_", 1)[1]: json.loads(path.read_text()) for path in paths}


def write_accumulation(directory: pathlib.Path, part: str) -> str:
    """The attention output's error where errors do and do not feed back, and KL."""
    head = ["model", "quantizer", "bits, whole cache", "static", "decode", "decode - static", "KL, nats"]
    return write_table(
        head,
        (
            [model, f"`{entry['quantizer']}`", *show_figures(entry)]
            for model, kept in read_accumulation(directory, part).items()
            for entry in kept["summary"]["quantizers"]
        ),
    )


def write_accumulated(directory: pathlib.Path, part: str) -> str:
    """The statements on accumulation: a verdict for each model."""
    verdicts: dict[str, dict[str, str]] = {}
    for model, kept in read_accumulation(directory, part).items():
        for claim in kept["summary"]["claims"]:
            verdicts.setdefault(f"{claim['id']}: {claim['claim']}", {})[model] = claim["verdict"]
    return _write_verdicts(verdicts)


def write_runs(directory: pathlib.Path, part: str) -> str:
    """What was run: problems, device, versions, date."""
    rows = []
    beside = (directory, directory.parent / "perplexity", directory.parent / "accumulation")
    for path in (path for folder in beside for path in sorted(folder.glob("*.json")) if part in path.stem):
        kept = json.loads(path.read_text())
        origin, problems = kept["provenance"], kept["summary"]["problems"]
        changes = [entry for entry in kept["summary"].get("changes", ()) if entry["change"] != CLEAN]
        changes += kept["summary"].get("quantizers", ())
        seeds = sorted({seed for entry in changes for seed in entry.get("seeds", (0,))})
        missing = problems["asked"] - problems["total"]
        valid = f"{problems['ok']} of {problems['total']}" + (f" ({problems['asked']} asked)" if missing > 0 else "")
        cells = [f"`{path.parent.name}/{path.name}`", valid, str(len(changes))]
        cells += [", ".join(map(str, seeds)), origin["device"]["kind"], f"jax {origin['packages']['jax']}"]
        rows.append([*cells, ", ".join(dict.fromkeys(origin["date"]))])
    return write_table(["file", "valid problems", "changes", "seeds", "device", "versions", "date"], rows)


TABLES: dict[str, Callable[[pathlib.Path, str], str]] = {
    "seed": write_seed,
    "kl": write_kl,
    "claims": write_claims,
    "pairs": write_pairs,
    "methods": write_methods,
    "bits": write_bits,
    "runs": write_runs,
    "perplexity": write_perplexity,
    "accumulation": write_accumulation,
    "accumulated": write_accumulated,
}


def fill(text: str, directory: pathlib.Path) -> str:
    """The page with its tables made anew.

    Raises:
      ValueError: a name that is no table's.
    """

    def replace(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"no table is named {found[2]}; there are {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[found[2]](directory, found[3] or '')}{found[4]}"

    return MARKED.sub(replace, text)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    page = pathlib.Path(arguments[0])
    page.write_text(fill(page.read_text(), page.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
