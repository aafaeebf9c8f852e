"""Records of every experiment as runs of 2026-11-29 wrote them: read without a loss, reported, refused if damaged."""

import fnmatch
import json
import pathlib

import msgspec
import pytest
from sample_records import damage, find_at

from jaxkv.experiments.report_parts import Run
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.page import FILES, report_run
from jaxkv.records import RECORDS, RunDirectory, read_record, to_line, to_plain, to_record

LINES = (pathlib.Path(__file__).parent / "data" / "records.jsonl").read_bytes().splitlines()
KEPT = {f"{number} {json.loads(line)['experiment']}": json.loads(line) for number, line in enumerate(LINES)}
# Mappings that hold what they like, and fields that older records lack.
FREE = ("precision", "device", "environment", "compiler_options", "spec", "model")
OPEN = (
    *("scores", "versions", "missing", "compile_seconds", "dtypes", "held", "aligned", "process"),
    *("kernels", "orders", "blocks", "reproduced"),
)
NEWER = (
    *("margin_other", "shift", "unit", "choice_flip"),
    *("truth", "framework", "operand_bits", "sum_bits", "casts_dropped"),
    *("again", "rounding", "columns", "reproduced", "fault"),  # of a tree that was not found
    *("joined", "times", "parts", "steps", "stride", "block", "order", "apart"),  # of a part of one, as it mostly is
)


def list_fields(value, path=()):
    """Paths of all fields, of lists the first and the last entry."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        if not isinstance(value, list) or name in (0, len(value) - 1):
            yield from list_fields(part, (*path, name))


def is_accepted(record):
    try:
        to_record(record)
    except ValueError:
        return False
    return True


def test_every_experiment_is_here():
    assert {record["experiment"] for record in KEPT.values()} == set(RECORDS)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_of_a_line_is_lost(name):
    read = read_record(to_line(KEPT[name]), name)
    assert type(read) is RECORDS[KEPT[name]["experiment"]]
    assert json.loads(msgspec.json.encode(read)) == KEPT[name]


@pytest.mark.parametrize("name", KEPT)
def test_what_is_damaged_is_refused(name):
    """Each field dropped, of another type, or beside one that nobody knows."""
    record = KEPT[name]
    doctor, accepted = record["experiment"] in ("doctor", "lowering"), []
    for path in list_fields(record):
        if path[0] == "experiment" or (path[0] in FREE and (doctor or path[0] == "precision") and len(path) > 1):
            continue
        inside_open = len(path) > 1 and (path[-2] in OPEN or (doctor and path[0] in ("dtypes", "missing")))
        changes = [("a list", [[{"?": 1}]])] + [("a mapping", {"?": [1]})] * (path[0] not in FREE)
        if not isinstance(path[-1], int) and not inside_open and path[-1] not in NEWER:
            changes.append(("dropped", ...))
        accepted += [(path, said) for said, change in changes if is_accepted(damage(record, path, change))]
    assert not accepted
    assert not is_accepted(record | {"nobody knows": 1})


@pytest.mark.parametrize("name", [name for name in KEPT if not name.endswith("foreign")])
def test_a_run_of_before_is_reported(name, tmp_path):
    record = KEPT[name]
    with RunDirectory.open(tmp_path, {"experiments": [record["experiment"]], "num_problems": 1}) as run:
        run.append(record)
    assert (tmp_path / "samples.jsonl").read_bytes() == to_line(record)
    assert report_run(tmp_path).renderables
    assert all(len((tmp_path / file).read_text()) > 200 for file in FILES)


# What no summary of one run takes from a record: it is kept for figures, for studies or for readers of the records.
SETTING = ("prompt_tokens", "shapes.*", "sampling.*", "headroom.*")
STEPS = ("*.margin", "*.margin_other", "*.unit")  # as far as they make no tie and no other kind of flip
UNREAD = {
    "divergence": (*STEPS, "truth.*.flip", "truth.*.kl", "truth.*.max_abs"),
    "drift": (*SETTING, "grid.*", "first.*.position", "first.*.places", "path.bit_equal"),
    "patching": (*SETTING, "heads.*", "by_layer.broken", "by_layer.bit_equal"),
    "parity": (*SETTING, *STEPS, "tokens", "choices.*"),
    "injection": (
        *SETTING, *STEPS, "run.tokens", "run.scores.strict.*", "run.scores.flexible.*", "free_running.compared_after",
        "cache.exact_bits", "teacher_forced.[jms]*", "teacher_forced.kl_reverse",
    ),
    "perplexity": (*SETTING, "logits.max_abs", "logits.bit_equal"),
    "accumulation": SETTING,
    "mitigations": (*SETTING, *STEPS, "tokens.fp64"),
    "attribution": (*SETTING, *STEPS),
}  # fmt: skip


def put_beside(record):
    """The records that one of its experiment is set beside."""
    if record["experiment"] == "attribution":
        return [record | {"variant": "none", "aligned": None, "key": [*record["key"][:2], "none"]}]
    if record["experiment"] == "injection":
        none = dict.fromkeys(("spec", "teacher_forced", "free_running", "saturated"))
        return [record | none | {"change": "none", "seed": 0, "key": [*record["key"][:2], "none", 0]}]
    return []


def summarize(record, others):
    run = Run("run", {"config": {}, "sessions": []}, list(map(to_record, [*others, record])))
    return json.dumps(to_plain(REPORTS[record["experiment"]].summarize(run)))


@pytest.mark.parametrize("name", [name for name in KEPT if name.split()[1] in UNREAD])
def test_every_figure_of_a_record_is_in_its_summary(name):
    """Each number changed: the summary changes with it, but for what is UNREAD."""
    record, lost = KEPT[name], set()
    others = put_beside(record)
    before = summarize(record, others)
    for path in list_fields(record):
        value = find_at(record, path)
        where = ".".join(part for part in path if isinstance(part, str))
        if where in ("key", "problem") or not isinstance(value, bool | int | float):
            continue
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 1.5 * value + 0.01
        changed = damage(record, path, other)
        if is_accepted(changed) and summarize(changed, others) == before:
            lost.add(where)
    unread = UNREAD[record["experiment"]]
    assert not {where for where in lost if not any(fnmatch.fnmatch(where, name) for name in unread)}
