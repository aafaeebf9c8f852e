"""The page on what of KVarN does the harm, from records of perplexity through each cache.

Its runs are those of launch/ablation.sh: of one model they differ in their caches alone.
"""

import dataclasses
import itertools
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.perplexity import report as perplexity
from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.experiments.report_parts import Run, name_of
from jaxkv.interventions.quantizers import CacheQuant, parse_cache_quant
from jaxkv.interventions.quantizers.kvarn import KVarN
from jaxkv.overview.gather import describe_origin, join_runs, read_runs
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Code, Heading, Paragraph, Table, to_markdown
from jaxkv.reporting.format import format_interval, format_number, format_percent

Kept = Mapping[str, Any]
ABOUT = """Perplexity of WikiText-2's test split through a quantized cache over that without one, in windows of
{context} tokens given and {scored} scored, each fed one by one through the cache. Cells that are compared
have the same first tokens in 16 bits and, at one tile, the same tokens that wait for their tile.
Normalisation left out keeps its scales, all 1: the bits do not change. Bits are counted: of an element of
keys and of values, and of the whole cache at a window's length, first and waiting tokens at 16. Intervals
are 95 %, over windows, each judged alone: {cells} caches of a model are looked at. KL(uncached || cached)
is in nats a token."""
EFFECTS = """Perplexity with the factor over that without it, paired by window; the geometric mean over all pairs of
cells that differ in it alone. Above 1 it harms. A tile of 128 leaves more tokens waiting in 16 bits."""


def load(runs: Sequence[pathlib.Path]) -> dict[str, Kept]:
    """Of each model, the records of each window under each cache, and where they came from.

    Raises UserError for runs of a model that differ in more than their caches.
    """
    by_model: dict[str, list[Run]] = defaultdict(list)
    for run in read_runs(runs):
        by_model[str(name_of(run.run["config"]["model"]))].append(run)
    kept = {}
    for model, members in sorted(by_model.items()):
        joined = join_runs(model, members)
        windows: dict[str, dict[int, PerplexityRecord]] = defaultdict(dict)
        for record in sorted(joined.of(PerplexityRecord), key=lambda one: one.problem):
            if record.status == "ok":
                windows[record.change][record.problem] = record
        cells = {
            entry["change"]: {**entry, "windows": windows[entry["change"]]}
            for entry in perplexity.summarize_perplexity(joined.records, joined.run)["changes"]
        }
        kept[model] = {"origin": describe_origin(joined), "cells": cells}
    return kept


def _interval(gaps: Sequence[float], windows: Sequence[PerplexityRecord]) -> str:
    """exp of the mean gap a token, with its interval over windows."""
    if not gaps:
        return "none valid"
    sizes = [window.tokens for window in windows]
    mean = math.exp(math.fsum(gaps) / sum(sizes))
    found = statistics.estimate_signed_mean(gaps, sizes)
    return format_interval(mean, found and list(map(math.exp, found.interval())), "{:.4g}".format)


def show_ratio(cell: Kept) -> str:
    """Cached over uncached perplexity of a cell."""
    windows = list(cell["windows"].values())
    return _interval([window.nats.cached - window.nats.uncached for window in windows], windows)


def show_effect(pairs: Sequence[tuple[Kept, Kept]]) -> str:
    """Perplexity of the first of each pair over that of the second: the geometric mean over pairs, paired by window."""
    both = [(first["windows"], second["windows"]) for first, second in pairs]
    common = sorted(set.intersection(*(set(windows) for pair in both for windows in pair)))
    gaps = [math.fsum(a[index].nats.cached - b[index].nats.cached for a, b in both) / len(both) for index in common]
    return _interval(gaps, [both[0][0][index] for index in common])


def _bits(cell: Kept) -> str:
    sides = (format_number(cell["spec"][side]["bits"], 4) if cell["spec"][side] else "16" for side in ("k", "v"))
    return f"{' / '.join(sides)}; {format_number(cell['cache']['bits'], 3)}"


def write_cells(kept: Mapping[str, Kept], wanted: Callable[[str], bool]) -> Table:
    """Each cell: bits, ratio, KL and share of flips by model."""
    names = dict.fromkeys(name for run in kept.values() for name in run["cells"] if name != CLEAN and wanted(name))
    parts = ("bits K / V; whole", "cached / uncached", "KL", "flips, %")
    rows = []
    for name in names:
        cells = (_list_cell(run["cells"].get(name)) for run in kept.values())
        rows.append([f"`{name}`", *itertools.chain.from_iterable(cells)])
    return Table(["cache", *(f"{model}: {part}" for model in kept for part in parts)], rows)


def _list_cell(cell: Kept | None) -> list[str]:
    if not cell or not cell["windows"]:
        return ["-", "none valid" if cell else "-", "-", "-"]
    windows = cell["windows"].values()
    tokens = math.fsum(window.tokens for window in windows)
    kl, flips = (math.fsum(getattr(window.logits, part) for window in windows) for part in ("kl", "flips"))
    return [_bits(cell), show_ratio(cell), format_number(kl / tokens), format_percent(flips / tokens)]


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
    for name in filter(in_factorial, names):
        quant = parse_cache_quant(name)
        other = _change(quant, sides, **without)
        if _change(quant, sides, **with_it) == name != other and other in names:
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


def write_effects(kept: Mapping[str, Kept]) -> Table:
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
    return Table(["factor", "quantized", "tile", "pairs", *kept], rows)


def _sides(name: str) -> tuple[bool, bool]:
    quant = parse_cache_quant(name)
    return quant.k.quantizer is not None, quant.v.quantizer is not None


def write_runs(kept: Mapping[str, Kept]) -> Table:
    """What was run: windows, device, versions, weights, date."""
    rows = []
    for model, run in kept.items():
        origin = run["origin"]
        cells = [cell for name, cell in run["cells"].items() if name != CLEAN]
        valid = sorted({len(cell["windows"]) for cell in cells})
        row = [model, str(len(cells)), " to ".join(map(str, valid[:: max(1, len(valid) - 1)]))]
        row += [origin["device"]["kind"], f"jax {origin['versions']['jax']}", ", ".join(origin["dates"])]
        row.append(", ".join(revision[:12] for revision in origin["revisions"]))
        files = origin["checkpoint"]["files"].items()
        weights = [digest for name, digest in files if name.endswith((".gguf", ".safetensors"))]
        rows.append([*row, *(f"`{digest[:12]}`" for digest in (*weights[:1], origin["data"]["problems"]["sha256"]))])
    head = ["model", "caches", "valid windows", "device", "versions", "date", "revisions"]
    return Table([*head, "weights, SHA-256", "text, SHA-256"], rows)


def render(kept: Mapping[str, Kept]) -> str:
    """The page."""
    windows = [one for run in kept.values() for cell in run["cells"].values() for one in cell["windows"].values()]
    scored, given = (
        ", ".join(map(str, sorted({getattr(one, part) for one in windows}))) for part in ("tokens", "prompt_tokens")
    )
    most = max(sum(name != CLEAN for name in run["cells"]) for run in kept.values())
    return to_markdown(
        "What of KVarN does the harm",
        [
            Paragraph(ABOUT.format(context=given, scored=scored, cells=most)),
            Heading("Main effects"),
            Paragraph(EFFECTS),
            write_effects(kept),
            Heading("The factorial"),
            Paragraph("KVarN at 2 bits, `passes=0` being without normalisation."),
            write_cells(kept, in_factorial),
            Heading("Beside other methods"),
            Paragraph("Other windows, layers, widths and methods."),
            write_cells(kept, lambda name: not in_factorial(name)),
            Heading("What was run"),
            Paragraph("`launch/ablation.sh`; the first of each model's commands, whose others are of other caches:"),
            Code("\n".join(run["origin"]["commands"][0] for run in kept.values())),
            write_runs(kept),
        ],
    )


def write_page(runs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """Writes README.md from the runs of launch/ablation.sh."""
    (out / "README.md").write_text(render(load(runs)))
