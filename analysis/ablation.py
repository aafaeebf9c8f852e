"""The page on what of KVarN does the harm, from records of perplexity through each cache.

python analysis/ablation.py                       # analysis/ablation/README.md from what is kept beside it
python analysis/ablation.py RUN...                # keeps the records of runs first, one file a model

Runs are those of launch/ablation.sh: of one model they differ in their caches alone. Of each window the sums are kept
that the page is made of.
"""

import dataclasses
import gzip
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import join_origins
from injection import write_table

from jaxkv.analysis import perplexity, statistics
from jaxkv.analysis.format import format_number, format_percent
from jaxkv.analysis.gather import name_of, read_runs
from jaxkv.analysis.joining import join_runs
from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import CacheQuant, parse_cache_quant
from jaxkv.interventions.quantizers.kvarn import KVarN
from jaxkv.schema_injection import CLEAN

HERE = pathlib.Path(__file__).parent / "ablation"
Kept = Mapping[str, Any]
ABOUT = """# What of KVarN does the harm

Perplexity of WikiText-2's test split through a quantized cache over that without one, in windows of {context} tokens
given and {scored} scored, each fed one by one through the cache. Cells that are compared have the same first tokens in
16 bits and, at one tile, the same tokens that wait for their tile. Normalisation left out keeps its scales, all 1: the
bits do not change. Bits are counted: of an element of keys and of values, and of the whole cache at a window's length,
first and waiting tokens at 16. Intervals are 95 %, over windows, each judged alone: {cells} caches of a model are
looked at. KL(uncached || cached) is in nats a token.

This page is `python analysis/ablation.py`, made from the files beside it.
"""
PARTS = """
## {title}

{text}

{table}"""


def keep(sources: Sequence[pathlib.Path], directory: pathlib.Path = HERE) -> list[pathlib.Path]:
    """Writes PLATFORM_MODEL.json.gz for the runs of each model: the sums of each window under each cache.

    Raises:
      UserError: runs of a model that differ in more than their caches, or one without a record.
    """
    by_model: dict[str, list[Any]] = {}
    for source, run in zip(sources, read_runs(sources), strict=True):
        by_model.setdefault(name_of(run.run["config"]["model"]), []).append((source, run))
    written = []
    for model, members in by_model.items():
        run = join_runs(model, [run for _, run in members])
        summary = perplexity.summarize_perplexity(run.records, run.run)
        if not summary["changes"]:
            raise UserError(f"the runs of {model} hold no records of perplexity; run launch/ablation.sh")
        windows: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in run.records:
            if record["status"] == "ok":
                windows.setdefault(record["change"], {})[record["problem"]] = record
        cells = {}
        for entry in summary["changes"]:
            rows = windows.get(entry["change"], {})
            cells[entry["change"]] = {
                "spec": entry.get("spec"),
                "cache": entry.get("cache"),
                "windows": {
                    str(index): [
                        *(row[part] for part in ("tokens", "prompt_tokens")),
                        *(row["nats"][arm] for arm in ("uncached", "cached")),
                        *(row["logits"][part] for part in ("kl", "flips")),
                    ]
                    for index, row in sorted(rows.items())
                },
            }
        provenance = join_origins([source for source, _ in members])
        path = directory / f"{provenance['device']['platform']}_{model}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"provenance": provenance, "invalid": summary["invalid"], "cells": cells})
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        written.append(path)
    return written


def load(directory: pathlib.Path = HERE) -> dict[str, Kept]:
    """The kept records by model."""
    kept = {}
    for path in sorted(directory.glob("*.json.gz")):
        model = path.name.split("_", 1)[1].removesuffix(".json.gz")
        kept[model] = json.loads(gzip.decompress(path.read_bytes()))
    return kept


def _interval(gaps: Mapping[str, float], tokens: Mapping[str, int]) -> str:
    """exp of the mean gap a token, with its interval over windows."""
    if not gaps:
        return "none valid"
    sums, sizes = list(gaps.values()), [tokens[window] for window in gaps]
    mean = math.exp(math.fsum(sums) / sum(sizes))
    if (found := statistics.estimate_signed_mean(sums, sizes)) is None:
        return f"{mean:.4g}"
    low, high = map(math.exp, found.interval())
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def show_ratio(cell: Kept) -> str:
    """Cached over uncached perplexity of a cell."""
    windows = cell["windows"]
    gaps = {index: row[3] - row[2] for index, row in windows.items()}
    return _interval(gaps, {index: row[0] for index, row in windows.items()})


def show_effect(pairs: Sequence[tuple[Kept, Kept]]) -> str:
    """Perplexity of the first of each pair over that of the second: the geometric mean over pairs, paired by window."""
    common = set.intersection(*(set(cell["windows"]) for pair in pairs for cell in pair))
    order = sorted(common, key=int)
    gaps = {
        index: math.fsum(first["windows"][index][3] - second["windows"][index][3] for first, second in pairs)
        / len(pairs)
        for index in order
    }
    return _interval(gaps, {index: pairs[0][0]["windows"][index][0] for index in order})


def _bits(cell: Kept) -> str:
    sides = (format_number(cell["spec"][side]["bits"], 4) if cell["spec"][side] else "16" for side in ("k", "v"))
    return f"{' / '.join(sides)}; {format_number(cell['cache']['bits'], 3)}"


def write_cells(kept: Mapping[str, Kept], wanted: Callable[[str], bool]) -> str:
    """Each cell: bits, ratio, KL and share of flips by model."""
    names = dict.fromkeys(name for run in kept.values() for name in run["cells"] if name != CLEAN and wanted(name))
    head = ["cache"]
    head += [
        f"{model}: {part}" for model in kept for part in ("bits K / V; whole", "cached / uncached", "KL", "flips, %")
    ]
    rows = []
    for name in names:
        cells = [f"`{name}`"]
        for run in kept.values():
            cell = run["cells"].get(name)
            if cell is None or not cell["windows"]:
                cells += ["-", "none valid" if cell else "-", "-", "-"]
                continue
            tokens, kl, flips = (math.fsum(row[part] for row in cell["windows"].values()) for part in (0, 4, 5))
            cells += [_bits(cell), show_ratio(cell), format_number(kl / tokens), format_percent(flips / tokens)]
        rows.append(cells)
    return write_table(head, rows)


def _change(quant: CacheQuant, sides: str, **fields: Any) -> str:
    """The name of a cache with other settings on some sides; those that are not quantized stay so."""
    found = {}
    for side in sides:
        method = getattr(quant, side).quantizer
        if method is not None:
            found[side] = dataclasses.replace(getattr(quant, side), quantizer=dataclasses.replace(method, **fields))
    return str(dataclasses.replace(quant, **found))


# What is set beside what: its name, the settings of the first and of the second, the sides they are of.
FACTORS: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("rotation of K", {"hadamard": True}, {"hadamard": False}, "k"),
    ("rotation of V", {"hadamard": True}, {"hadamard": False}, "v"),
    ("normalisation", {"passes": 8}, {"passes": 0}, "kv"),
    ("tiles of 128, not 32", {"tile": 128}, {"tile": 32}, "kv"),
)


def list_pairs(names: Sequence[str], factor: int) -> list[tuple[str, str]]:
    """Cells of the factorial that differ in one factor alone."""
    _, with_it, without, sides = FACTORS[factor]
    found = []
    for name in names:
        if not in_factorial(name):
            continue
        quant = parse_cache_quant(name)
        if all(getattr(quant, side).quantizer is None for side in sides):
            continue
        if _change(quant, sides, **with_it) == name and (other := _change(quant, sides, **without)) in names:
            found.append((name, other))
    return found


def in_factorial(name: str) -> bool:
    """Whether a cache is KVarN's at 2 bits with 16 first tokens in all layers, on whichever side."""
    if name == CLEAN:
        return False
    quant = parse_cache_quant(name)
    sides = [side for side in (quant.k, quant.v) if side.quantizer is not None]
    return all(
        isinstance(side.quantizer, KVarN) and side.quantizer.bits == 2 and side.first == 16 and side.layers is None
        for side in sides
    )


def _tile(name: str) -> int:
    quant = parse_cache_quant(name)
    method = quant.k.quantizer or quant.v.quantizer
    return method.granularity if method else 0


def write_effects(kept: Mapping[str, Kept]) -> str:
    """The factors' main effects: one at a time, over all pairs of cells of a tile that differ in it alone."""
    rows = []
    for index, (label, *_) in enumerate(FACTORS):
        for sides, which in (("K and V", (True, True)), ("K alone", (True, False)), ("V alone", (False, True))):
            for tile in (32, 128):
                cells, count = [], 0
                for run in kept.values():
                    pairs = [
                        (run["cells"][first], run["cells"][second])
                        for first, second in list_pairs(list(run["cells"]), index)
                        if _tile(first) == tile and _sides(first) == which
                    ]
                    count = max(count, len(pairs))
                    cells.append(show_effect(pairs) if pairs else "-")
                if count:
                    rows.append([label, sides, "128 / 32" if "tile" in label else str(tile), str(count), *cells])
    return write_table(["factor", "quantized", "tile", "pairs", *kept], rows)


def _sides(name: str) -> tuple[bool, bool]:
    quant = parse_cache_quant(name)
    return quant.k.quantizer is not None, quant.v.quantizer is not None


def write_runs(kept: Mapping[str, Kept]) -> str:
    """What was run: windows, device, versions, weights, date."""
    rows = []
    for model, run in kept.items():
        origin = run["provenance"]
        cells = {name: cell for name, cell in run["cells"].items() if name != CLEAN}
        valid = sorted({len(cell["windows"]) for cell in cells.values()})
        packages, device = origin["packages"], origin["device"]
        row = [model, f"{len(cells)}", " to ".join(map(str, valid[:: max(1, len(valid) - 1)])), device["kind"]]
        row += [f"jax {packages['jax']}", ", ".join(dict.fromkeys(origin["date"]))]
        files = origin["checkpoint"]["files"].items()
        weights = [digest for name, digest in files if name.endswith((".gguf", ".safetensors"))]
        rows.append([*row, *(f"`{digest[:12]}`" for digest in (*weights[:1], origin["data"]["problems"]["sha256"]))])
    return write_table(
        ["model", "caches", "valid windows", "device", "versions", "date", "weights, SHA-256", "text, SHA-256"], rows
    )


def render(kept: Mapping[str, Kept]) -> str:
    """The page."""
    rows = [row for run in kept.values() for cell in run["cells"].values() for row in cell["windows"].values()]
    scored, given = (", ".join(str(count) for count in sorted({row[part] for row in rows})) for part in (0, 1))
    most = max(sum(name != CLEAN for name in run["cells"]) for run in kept.values())
    first = [run["provenance"]["command"] for run in kept.values()]
    commands = [command if isinstance(command, str) else command[0] for command in first]
    parts = (
        (
            "Main effects",
            "Perplexity with the factor over that without it, paired by window; the geometric mean over all pairs of\n"
            "cells that differ in it alone. Above 1 it harms. A tile of 128 leaves more tokens waiting in 16 bits.",
            write_effects(kept),
        ),
        ("The factorial", "KVarN at 2 bits, `passes=0` being without normalisation.", write_cells(kept, in_factorial)),
        (
            "Beside other methods",
            "Other windows, layers, widths and methods.",
            write_cells(kept, lambda name: not in_factorial(name)),
        ),
        (
            "What was run",
            "`launch/ablation.sh`; the first of each model's commands, whose others are of other caches:\n\n"
            + "\n".join(f"    {command}" for command in commands),
            write_runs(kept),
        ),
    )
    page = ABOUT.format(context=given, scored=scored, cells=most)
    return page + "".join(PARTS.format(title=title, text=text, table=table) for title, text, table in parts)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if arguments:
        print(*keep(list(map(pathlib.Path, arguments))), sep="\n")
    kept = load()
    if not kept:
        raise UserError(f"{HERE.name}/ holds no kept records; name the runs of launch/ablation.sh")
    (HERE / "README.md").write_text(render(kept))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
