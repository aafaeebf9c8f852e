"""The law of flips against counts: predicted from margins and a noise scale, and seen, condition by condition.

python analysis/law.py               # analysis/law/README.md and its figure from what is kept beside it
python analysis/law.py RUN...        # keeps the steps of runs first: those of 'divergence' and 'injection'

Of each teacher-forced step the columns that the law is made of are kept, in one Parquet file.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from injection import write_table
from scipy import optimize, stats

from jaxkv.analysis import statistics
from jaxkv.analysis.format import format_number
from jaxkv.analysis.gather import name_of, read_runs
from jaxkv.analysis.law import NEAR, check_law, predict
from jaxkv.schema_injection import CLEAN

HERE = pathlib.Path(__file__).parent / "law"
FEWEST = 16  # sequences; runs that time cut short count as far as they went
LEAST = 1e-7  # flips per step; less is not drawn
COLUMNS = ("margin", "shift", "margin_other", "unit", "flip")
ABOUT = """# The law of flips

How often the two best tokens swap between the arms, predicted from the margins between them and from the shift of that
gap (`jaxkv/analysis/law.py` derives both forms; flips are teacher-forced argmax flips): `linear` is the density of
margins at 0 times the mean absolute shift over two, `convolution` takes the two distributions whole. `from fp32` uses
the margins of the fp32 run of the same model, framework and sampler, and of the condition its mean shift alone.
Intervals are 95 %, of counts over sequences. A count of 0 has its upper bound. The law is one of small shifts:
where the mean shift passes half a logit the density of margins is no longer flat on its scale, a third token
overtakes both, and more tokens flip than predicted; such conditions are told apart below.

This page is `python analysis/law.py`, made from the files beside it. Runs on the H200 are of the tree of
734c53c, which the machine knew by an older commit alone.

![Flips predicted and seen, of each condition](law.png)

{fits}
{table}
## What was run

{runs}
"""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Steps of one condition.

    Attributes:
      name: model, precision, sampler, framework and cache.
      group: conditions of one model, framework and sampler: those that share an fp32 run.
      precision: with its overrides.
      device: where it ran.
      samples: per sequence the columns of its steps.
    """

    name: str
    group: str
    precision: str
    device: str
    samples: Sequence[Mapping[str, Any]]


def _split(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Comparisons of a run by the change of its cache; of 'divergence' there is one, without a change."""
    plain = [r["teacher_forced"] for r in records if r["experiment"] == "divergence" and r["teacher_forced"]]
    if len(plain) >= FEWEST:
        yield "", plain
    changed: dict[str, list[Any]] = {}
    for record in records:
        if record["experiment"] == "injection" and record["change"] != CLEAN and record["teacher_forced"]:
            changed.setdefault(record["change"], []).append(record["teacher_forced"])
    yield from ((change, found) for change, found in changed.items() if len(found) >= FEWEST)


def keep(sources: Sequence[pathlib.Path]) -> None:
    """Writes steps.parquet, and runs.json with what the steps came from."""
    columns: dict[str, list[Any]] = {name: [] for name in ("condition", "sequence", *COLUMNS)}
    conditions: list[dict[str, str]] = []
    for run in read_runs(sources):
        config = run.run["config"]
        model, sampler, framework = name_of(config["model"]), config["sampling"]["sampler"], config["framework"]
        precision = config["precision"]["name"]
        for change, found in _split(run.records):
            if "shift" not in found[0]:
                continue
            session = run.run["sessions"][-1]
            conditions.append(
                {
                    "name": " ".join(filter(None, (model, precision, sampler, framework, change))),
                    "group": f"{model} {framework} {sampler}",
                    "precision": precision,
                    "device": config["device"]["kind"],
                    "versions": f"jax {config['versions']['jax']}",
                    "date": session["started"][:10],
                    "revision": str(session.get("git"))[:12],
                }
            )
            for number, sample in enumerate(found):
                steps = len(sample["flip"])
                columns["condition"] += [len(conditions) - 1] * steps
                columns["sequence"] += [number] * steps
                for name in COLUMNS:
                    columns[name] += sample[name]
    HERE.mkdir(exist_ok=True)
    kinds = {"condition": pa.int16(), "sequence": pa.int16(), "flip": pa.bool_()}
    table = pa.table({name: pa.array(values, kinds.get(name, pa.float32())) for name, values in columns.items()})
    pq.write_table(table, HERE / "steps.parquet", compression="zstd", compression_level=19)
    (HERE / "runs.json").write_text(json.dumps(conditions, indent=1) + "\n")


def load() -> list[Condition]:
    """The kept conditions."""
    table = pq.read_table(HERE / "steps.parquet")
    arrays = {name: table[name].to_numpy() for name in table.column_names}
    found = []
    for index, about in enumerate(json.loads((HERE / "runs.json").read_text())):
        mine = arrays["condition"] == index
        samples = [
            {name: arrays[name][mine & (arrays["sequence"] == number)] for name in COLUMNS}
            for number in np.unique(arrays["sequence"][mine])
        ]
        found.append(Condition(about["name"], about["group"], about["precision"], about["device"], samples))
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """The law beside the count of one condition; rates are flips per step."""

    condition: Condition
    steps: int
    seen: int
    interval: tuple[float, float]
    shift: float
    linear: float
    convolution: float
    from_wide: float | None


def make_rows(conditions: Sequence[Condition]) -> list[Row]:
    """The law on each condition."""
    wide = {c.group: np.concatenate([s["margin"] for s in c.samples]) for c in conditions if c.precision == "fp32"}
    rows = []
    for condition in conditions:
        checked = check_law(condition.samples)
        assert checked is not None
        said = checked.prediction
        flips, sizes = [int(s["flip"].sum()) for s in condition.samples], [len(s["flip"]) for s in condition.samples]
        margins = wide.get(condition.group)
        rows.append(
            Row(
                condition,
                said.steps,
                checked.flips,
                statistics.clustered_share_interval(flips, sizes),
                said.shift,
                said.linear,
                said.convolution,
                None if margins is None else predict(margins, [said.shift]).linear,
            )
        )
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


def draw(rows: Sequence[Row]) -> None:
    """law.png: seen against predicted flips per step, both axes in log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5.2), dpi=110)
    kinds = {"cache": "s", "torch": "^", "jax": "o"}
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r.condition.name.split()[0] for r in rows))}
    for row in rows:
        words = row.condition.name.split()
        kind = "cache" if len(words) > 4 else words[3]
        seen = row.seen / row.steps
        style = {"color": colours[words[0]], "marker": kinds[kind], "markersize": 5, "alpha": 0.8}
        if row.seen:
            low, high = row.interval
            axes.errorbar(
                row.convolution, seen, [[seen - low], [high - seen]], linestyle="none", linewidth=0.7, **style
            )
        elif row.convolution > LEAST:
            bound = statistics.zero_upper_bound(row.steps)
            axes.plot(row.convolution, bound, **(style | {"marker": 7}), markerfacecolor="none", linestyle="none")
    ends = np.array([LEAST, max(r.convolution for r in rows) * 2])
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="flips per step, predicted (convolution)", ylabel="flips per step, seen"
    )
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    for kind, label in (("o", "JAX"), ("^", "PyTorch"), ("s", "quantized cache")):
        axes.plot([], [], kind, color="0.3", label=label)
    axes.plot([], [], marker=7, color="0.3", markerfacecolor="none", linestyle="none", label="none seen: upper bound")
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "law.png", metadata={"Software": None})
    plt.close(figure)


def render(rows: Sequence[Row]) -> str:
    """The page."""
    cells = []
    for row in rows:
        low, high = row.interval
        seen = f"{row.seen} ({format_number(low * row.steps, 2)} to {format_number(high * row.steps, 2)})"
        if not row.seen:
            seen = f"0 (below {format_number(statistics.zero_upper_bound(row.steps) * row.steps, 2)})"
        said = [
            "-" if rate is None else format_number(rate * row.steps, 3)
            for rate in (row.linear, row.convolution, row.from_wide)
        ]
        cells.append([row.condition.name, str(row.steps), format_number(row.shift, 2), seen, *said])
    head = ["condition", "steps", "mean absolute shift, logits", "flips seen", "linear", "convolution", "from fp32"]
    total, steps = sum(row.seen for row in rows), sum(row.steps for row in rows)
    lines = [f"{len(rows)} conditions, {total} flips in {steps} steps.", ""]
    fits = []
    for small in (True, False):
        told = [row for row in rows if row.convolution > 0 and (row.shift < NEAR) == small]
        for label, pick in (
            ("linear", lambda r: r.linear),
            ("convolution", lambda r: r.convolution),
            ("from fp32", lambda r: r.from_wide),
        ):
            kept = [(pick(row) * row.steps, row.seen) for row in told if pick(row)]
            predicted, seen = (np.array(column, float) for column in zip(*kept, strict=True))
            size = f"{'below' if small else 'above'} {NEAR:g} logits"
            fits.append([size, label, str(len(kept)), *fit(predicted, seen)])
    head_of_fits = ["mean absolute shift", "form", "conditions", "flips seen over predicted", "exponent of predicted"]
    lines.append(write_table(head_of_fits, fits))
    about = json.loads((HERE / "runs.json").read_text())
    kinds = sorted({(a["device"], a["versions"], a["date"], a["revision"]) for a in about})
    runs = write_table(["device", "versions", "date", "revision"], [list(kind) for kind in kinds])
    return ABOUT.format(fits="\n".join(lines), table=write_table(head, cells), runs=runs)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        keep([pathlib.Path(argument) for argument in arguments])
    rows = make_rows(load())
    draw(rows)
    (HERE / "README.md").write_text(render(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
