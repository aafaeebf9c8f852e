"""The figures of a study's report, drawn from its summary alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, name_pair
from jaxkv.experiments.report_parts import base_precision
from jaxkv.reporting.document import Figure
from jaxkv.reporting.format import format_number, format_percent
from jaxkv.reporting.svg import Chart, draw_cells, limits

Study = Mapping[str, Any]
PRECISIONS = ("fp16", "bf16", "fp32", "fp64")
SERIES = 6  # colours there are


def _panels(study: Study) -> dict[str, list[Mapping[str, Any]]]:
    """Conditions with curves by panel: model, sampler, framework, regime; precisions are its series.

    Batch sizes have panels of their own where there are several, the larger first, since they ask more problems.
    """
    panels: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    drawn = [c for c in study["conditions"] if c.get("curves") and c["curves"]["kl"]]
    several = len({c["batch_size"] for c in drawn}) > 1
    for condition in sorted(drawn, key=lambda c: -(c["batch_size"] or 0)):
        parts = [condition["model"] or condition["name"], condition["sampler"]]
        parts += [part for part in (condition["framework"], condition["regime"]) if part not in ("jax", "plain")]
        parts += [f"batch {condition['batch_size']}"] if several and condition["batch_size"] else []
        panels[", ".join(filter(None, parts))].append(condition)
    for members in panels.values():
        members.sort(key=lambda c: (PRECISIONS.index(p) if (p := base_precision(c)) in PRECISIONS else 9, c["name"]))
    return {title: members[:SERIES] for title, members in panels.items()}


def _colour(condition: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> int:
    """One colour a precision in all panels; another where a panel has two of one."""
    own = base_precision(condition)
    same = [c for c in members if base_precision(c) == own]
    place = PRECISIONS.index(own) if own in PRECISIONS else 3
    return place if condition is same[0] else 3 + members.index(condition) % 3


def draw_divergence(study: Study) -> list[Figure]:
    """Where the arms part."""
    return [*draw_position(study), *draw_margins(study)]


def draw_position(study: Study) -> list[Figure]:
    """Mean KL by step, and the share of free runs that have parted."""
    kl, parted, equal, together = [], [], [], []
    for title, members in _panels(study).items():
        binned = {c["name"]: [(b["step"], b["mean"]) for b in c["curves"]["kl"]] for c in members}
        last = max(step for points in binned.values() for step, _ in points)
        low, high = limits([mean for points in binned.values() for _, mean in points], log=True)
        chart = Chart(title, (0, last, "step", False), (low, high, "mean KL, nats", True), "Mean KL by step")
        steps = max(c["curves"]["diverged"][-1][0] for c in members)
        top = max(share for c in members for _, share in c["curves"]["diverged"])
        free = Chart(title, (0, steps, "token", False), (0, max(top, 0.05), "share parted", False), "Share by token")
        for condition in members:
            colour, label = _colour(condition, members), condition["precision"] or condition["name"]
            points = [point for point in binned[condition["name"]] if point[1] > 0]
            chart.legend(colour, label if points else f"{label}: 0")
            if points:
                chart.line(colour, points)
            free.legend(colour, label)
            free.line(colour, [(x, y) for x, y in condition["curves"]["diverged"]], steps=True)
        if any(mean for points in binned.values() for _, mean in points):
            kl.append(chart.svg)
        else:
            equal.append(title)
        if top:
            parted.append(free.svg)
        else:
            together.append(title)
    by_step = "KL(uncached to cached) by step, teacher-forced: means over sequences in bins of steps."
    by_step += " Steps without any difference have no place on the axis."
    by_token = "Running free: the share of sequences whose two arms have parted by a token."
    if equal:
        by_step += f" Not drawn, since no step differs: {'; '.join(equal)}."
    if together:
        by_token += f" Not drawn, since no sequence parts (bounds in the table): {'; '.join(together)}."
    return [Figure(drawn, text) for drawn, text in ((kl, by_step), (parted, by_token)) if drawn or equal or together]


def draw_margins(study: Study) -> list[Figure]:
    """Margin against perturbation of 16-bit conditions, flips marked."""
    panels, drawn = [], set()
    for title, members in _panels(study).items():
        for condition in members:
            found = condition["curves"]["margins"]
            kind = tuple(condition[part] for part in ("model", "precision", "framework", "regime"))
            if base_precision(condition) not in ("fp16", "bf16") or kind in drawn:
                continue
            if not any(moved for moved, _ in found["flips"] + found["others"]):
                continue  # every step has equal bits
            drawn.add(kind)
            flips, others = ([tuple(point) for point in found[name]] for name in ("flips", "others"))
            moved = limits([x for x, _ in flips + others], log=True)
            margin = limits([y for _, y in flips + others], log=True)
            chart = Chart(
                f"{title}, {condition['precision']}",
                (*moved, "largest logit difference", True),
                (*margin, "margin", True),
                f"{len(flips)} flips",
            )
            ends = max(moved[0], margin[0] / 2), min(moved[1], margin[1] / 2)
            if ends[0] < ends[1]:
                chart.rule([(end, 2 * end) for end in ends])
            chart.dots(0, others)
            chart.dots(1, flips, "mark")
            every = f", 1 in {found['every']}" if found["every"] > 1 else ""
            chart.legend(0, f"no flip{every}")
            chart.legend(1, f"flip ({len(flips)})")
            panels.append(chart.svg)
    if not panels:
        return []
    return [
        Figure(
            panels,
            "Margin of the uncached arm (top logit minus second) against the largest logit difference, one dot a step. "
            "Below the dashed line (margin = twice the difference) a flip is possible; above it, it is not. Exact ties "
            "lie on the floor, steps without a difference on the left edge. One condition of each model and precision.",
        )
    ]


def name_group(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Model, precision and sampler of a group of cells, and its batch size where there are several."""
    several = len({g["batch_size"] for g in groups}) > 1 and group["batch_size"]
    batch = f", batch {group['batch_size']}" if several else ""
    return f"{group['model']} {group['precision']}, {group['sampler']}{batch}"


def draw_parity(study: Study) -> list[Figure]:
    """Matrices of cells: sequences that part, KL, and the residual stream by layer."""
    figures, matrices, same = [], [], []
    for group in study["parity"]:
        cells = list(group["cells"])
        shares = {pair: found["diverged"]["rate"] for pair, found in group["pairs"].items()}
        title = name_group(group, study["parity"])
        if any(shares.values()):
            matrices.append(_draw_matrix(title, cells, shares, lambda v: f"{format_percent(v)} %"))
        else:
            same.append(f"{title} ({group['problems']} problems)")
    if matrices or same:
        text = "Share of sequences that part, running free, between every pair of cells."
        text += f" Not drawn, since no pair parts (bounds below): {'; '.join(same)}." if same else ""
        figures.append(Figure(matrices, text))
    kl, layers = [], []
    for condition in study["conditions"]:
        found = condition.get("parity")
        if not found or found["status"] != "ok":
            continue
        title = f"{condition['model']} {condition['precision']}, {condition['sampler']}"
        means = {pair: values["kl"]["mean"] for pair, values in found["pairs"].items() if values}
        kl.append(_draw_matrix(title, list(CELLS), means, format_number, log=True))
        layers.append(_draw_layers(title, found["layers"]["mean"]))
    if kl:
        figures += [
            Figure(kl, "Mean KL in nats between every pair of cells along the same tokens; the row is the reference."),
            Figure(
                layers, "Distance of the residual stream entering each layer, relative to its norm; last: the norm."
            ),
        ]
    return figures


def _draw_matrix(title: str, cells: Sequence[str], pairs: Mapping[str, float], show: Any, log: bool = False) -> Any:
    values = [[pairs.get(name_pair(a, b)) for b in cells] for a in cells]
    filled = [
        [pairs.get(name_pair(b, a)) if v is None else v for b, v in zip(cells, row, strict=True)]
        for a, row in zip(cells, values, strict=True)
    ]
    short = [cell.replace("uncached", "−").replace("cached", "+") for cell in cells]
    return draw_cells(
        title, list(cells), short, filled, show, print_values=True, log=log, x_label="+ cached, − uncached"
    )


def _draw_layers(title: str, means: Mapping[str, Sequence[float]]) -> Any:
    shown = {
        "cache, JAX": means[CACHE_PAIRS["jax"]],
        "cache, torch": means[CACHE_PAIRS["torch"]],
        "framework": means[FRAMEWORK_PAIRS["uncached"]],
    }
    values = [value for column in shown.values() for value in column]
    low, high = limits(values, log=True)
    last = max(len(column) for column in shown.values()) - 1
    chart = Chart(title, (0, last, "layer", False), (low, high, "relative distance", True), "Distance by layer")
    for series, (name, column) in enumerate(shown.items()):
        points = [(layer, value) for layer, value in enumerate(column) if value > 0]
        chart.legend(series, name if points else f"{name}: 0")
        if points:
            chart.line(series, points)
    return chart.svg
