"""The law of flips against counts: predicted from margins and a noise scale, and seen, condition by condition."""

import dataclasses
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from scipy import optimize, stats

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.injection.record import InjectionRecord
from jaxkv.experiments.law import NEAR, Prediction, check_steps, predict
from jaxkv.experiments.record_parts import CLEAN, Comparison
from jaxkv.experiments.report_parts import Run, name_of
from jaxkv.overview.gather import drop_copies, read_runs
from jaxkv.reporting import statistics
from jaxkv.reporting.charts import Axis, Point, Scatter, Series, limits
from jaxkv.reporting.document import Heading, Paragraph, Table, to_markdown
from jaxkv.reporting.drawing import FONT, VARIABLES
from jaxkv.reporting.drawing import draw as draw_chart
from jaxkv.reporting.format import format_number, format_percent

FEWEST = 16  # sequences
LEAST = 1e-7  # flips per step; less is not drawn
COLUMNS = ("margin", "shift", "margin_other", "unit", "flip")
ABOUT = """How often the two best tokens swap between the arms, predicted from the margins between them and from the
shift of that gap (`jaxkv/experiments/law.py` derives both forms; flips are teacher-forced argmax flips):
`linear` is the density of margins at 0 times the mean absolute shift over two, `convolution` takes the
two distributions whole. `from fp32` uses the margins of the fp32 run of the same model, framework and
sampler, and of the condition its mean shift alone. Intervals are 95 %, of counts over sequences. A count
of 0 has the bound of the sequences that flip. The law is one of small shifts: where the mean shift passes
half a logit the density of margins is no longer flat on its scale, a third token overtakes both, and more
tokens flip than predicted; such conditions are told apart below."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Steps of one condition: per sequence its columns.

    A group has conditions of one model, framework and sampler: those that share an fp32 run.
    """

    name: str
    group: str
    precision: str
    device: str
    samples: Sequence[Mapping[str, Any]]


def _split(run: Run) -> Iterator[tuple[str, list[Comparison]]]:
    """Comparisons of a run by the change of its cache; of 'divergence' there is one, without a change."""
    plain = [record.teacher_forced for record in run.of(DivergenceRecord) if record.teacher_forced]
    if run.run["config"]["decoding"].get("regime", "plain") == "plain":
        yield "", plain
    changed: dict[str, list[Comparison]] = defaultdict(list)
    for record in run.of(InjectionRecord):
        if record.change != CLEAN and record.seed == 0 and record.teacher_forced:
            changed[record.change].append(record.teacher_forced)
    yield from changed.items()


def load(runs: Sequence[pathlib.Path]) -> list[Condition]:
    """The conditions of runs that have steps enough; of those made twice the one with more sequences."""
    found: dict[str, Condition] = {}
    for run in drop_copies(read_runs(runs))[0]:
        config = run.run["config"]
        if not (run.of(DivergenceRecord) or run.of(InjectionRecord)):
            continue
        model, sampler, framework = name_of(config["model"]), config["sampling"]["sampler"], config["framework"]
        precision = config["precision"]["name"]
        for change, records in _split(run):
            name = " ".join(filter(None, (model, precision, sampler, framework, change)))
            if len(records) < FEWEST or (name in found and len(found[name].samples) >= len(records)):
                continue
            samples = [{column: np.asarray(getattr(record, column)) for column in COLUMNS} for record in records]
            group = f"{model} {framework} {sampler}"
            found[name] = Condition(name, group, precision, config["device"]["kind"], samples)
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Row:
    """The law beside the count of one condition; rates are flips per step."""

    condition: Condition
    seen: int
    interval: tuple[float, float]
    law: Prediction
    from_wide: float | None


def make_rows(conditions: Sequence[Condition]) -> list[Row]:
    """The law on each condition."""
    wide = {c.group: np.concatenate([s["margin"] for s in c.samples]) for c in conditions if c.precision == "fp32"}
    rows = []
    for condition in conditions:
        checked = check_steps({name: np.concatenate([s[name] for s in condition.samples]) for name in COLUMNS})
        said = Prediction(**checked["prediction"])
        flips, sizes = [int(s["flip"].sum()) for s in condition.samples], [len(s["flip"]) for s in condition.samples]
        interval = statistics.clustered_share_interval(flips, sizes)
        margins = wide.get(condition.group)
        from_wide = None if margins is None else predict(margins, [said.shift]).linear
        rows.append(Row(condition, checked["flips"], interval, said, from_wide))
    return rows


def fit(predicted: np.ndarray, seen: np.ndarray) -> tuple[str, str]:
    """seen = a * predicted^b as a Poisson law with the spread that the conditions show: a and b with intervals."""
    x = np.log(predicted)

    def loss(ab: np.ndarray) -> float:
        rate = ab[0] + ab[1] * x
        return float(np.sum(np.exp(rate) - seen * rate))

    best = optimize.minimize(loss, np.array([0.0, 1.0])).x
    mean = np.exp(best[0] + best[1] * x)
    design = np.stack([np.ones_like(x), x], 1)
    spread = max(1.0, float(np.sum((seen - mean) ** 2 / mean)) / (len(x) - 2))
    error = np.sqrt(np.diag(np.linalg.inv((design * mean[:, None]).T @ design)) * spread)
    slope = float(seen.sum() / predicted.sum())
    t = float(stats.t.ppf(0.975, len(x) - 2))
    ratio = t * np.sqrt(np.sum((seen - slope * predicted) ** 2)) / predicted.sum()
    return (
        f"{slope:.3g} [{slope - ratio:.3g}, {slope + ratio:.3g}]",
        f"{best[1]:.3g} [{best[1] - t * error[1]:.3g}, {best[1] + t * error[1]:.3g}]",
    )


def _bound(row: Row) -> float:
    """Flips per step of a condition without one, if as many sequences as may go unseen had one each."""
    sequences = len(row.condition.samples)
    return statistics.zero_upper_bound(sequences) * sequences / row.law.steps


def draw(rows: Sequence[Row]) -> str:
    """Seen against predicted flips per step, both axes in log, as SVG."""
    told = [(row, row.seen / row.law.steps) for row in rows if row.law.convolution > LEAST]
    drawn = [rate for row, seen in told for rate in (row.law.convolution, seen or _bound(row))]
    low, high = limits(drawn, log=True)
    points: dict[str, list[Point]] = defaultdict(list)
    for row, seen in told:
        span = (max(low, row.interval[0]), row.interval[1]) if seen else (low, _bound(row))
        said = f"{row.condition.name}: {row.seen} flips in {row.law.steps} steps"
        points[row.condition.name.split()[0]].append(Point(row.law.convolution, seen, span, said))
    series = [Series(model, found) for model, found in points.items()]
    axes = Axis("predicted (convolution)", True, low, high), Axis("seen", True, low, high)
    chart = Scatter("Flips per step", series, *axes, [(low, low), (high, high)])
    text = ET.tostring(draw_chart(chart), encoding="unicode")
    for colour, variable in VARIABLES.items():
        text = text.replace(variable, colour)
    head = f'<svg font-family="{FONT}, Arial, sans-serif" xmlns="http://www.w3.org/2000/svg" '
    return text.replace("<svg ", head, 1) + "\n"


FORMS = {
    "linear": lambda row: row.law.linear,
    "convolution": lambda row: row.law.convolution,
    "from fp32": lambda row: row.from_wide,
}


def write_fits(rows: Sequence[Row]) -> Table:
    """How the counts go with what is predicted, below and above the shift up to which the law holds."""
    fits = []
    for small in (True, False):
        told = [row for row in rows if row.law.convolution > 0 and (row.law.shift < NEAR) == small]
        for label, pick in FORMS.items():
            kept = [(pick(row) * row.law.steps, row.seen) for row in told if pick(row)]
            if len(kept) < 3:
                continue
            predicted, seen = (np.array(column, float) for column in zip(*kept, strict=True))
            side = f"{'below' if small else 'above'} {NEAR:g} logits"
            fits.append([side, label, str(len(kept)), *fit(predicted, seen)])
    head = ["mean absolute shift", "form", "conditions", "flips seen over predicted", "exponent of predicted"]
    return Table(head, fits)


def write_rows(rows: Sequence[Row]) -> Table:
    """Each condition."""
    cells = []
    for row in rows:
        low, high = row.interval
        seen = f"{row.seen} ({format_number(low * row.law.steps, 2)} to {format_number(high * row.law.steps, 2)})"
        if not row.seen:
            share = statistics.zero_upper_bound(len(row.condition.samples))
            seen = f"0 (in less than {format_percent(share)} of sequences)"
        rates = (pick(row) for pick in FORMS.values())
        said = ["-" if rate is None else format_number(rate * row.law.steps, 3) for rate in rates]
        cells.append([row.condition.name, str(row.law.steps), format_number(row.law.shift, 2), seen, *said])
    return Table(["condition", "steps", "mean absolute shift, logits", "flips seen", *FORMS], cells)


def render(rows: Sequence[Row]) -> str:
    """The page."""
    devices = ", ".join(sorted({row.condition.device for row in rows}))
    total, steps = sum(row.seen for row in rows), sum(row.law.steps for row in rows)
    return to_markdown(
        "The law of flips",
        [
            Paragraph(ABOUT),
            Paragraph("![Flips predicted and seen, of each condition](law.svg)"),
            Paragraph(
                "A line is the interval of a count; a dot on the floor is of none seen, and its line ends at the "
                "bound, a flip each."
            ),
            Paragraph(f"{len(rows)} conditions on {devices}, {total} flips in {steps} steps."),
            write_fits(rows),
            Heading("The conditions"),
            write_rows(rows),
            Paragraph(
                "Commands, dates, versions and revisions are on the pages of `study`, `qwen`, `caches` and `shipped`."
            ),
        ],
    )


def write_page(runs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """Writes README.md and law.svg from runs of 'divergence' and 'injection'."""
    rows = make_rows(load(runs))
    (out / "law.svg").write_text(draw(rows))
    (out / "README.md").write_text(render(rows))
