"""Tasks of lm-evaluation-harness, `lm_eval:NAME`: any that generates text, with lm_eval's own code for all of it.

NAME is a task that comes with lm_eval or a YAML file in its format. Prompts, worked examples, stop strings, filters,
metrics and their aggregation are asked of lm_eval's Task. Ours are the decoding, the most tokens (lm_eval's default is
256 too) and, where files are given, the reading of the data set's rows.

A scorer is called METRIC,FILTER, as in lm_eval's results. What is no plain right or wrong has its value on the one text
beside it; only full marks count as correct.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.files import explain, read_text, reading
from jaxkv.tasks.sources import Source, asking_hub, hash_rows, load_rows, quiet
from jaxkv.tasks.task import Problem, PromptSpec, Request, Scores, Task, require, versions

_NAME = re.compile(r"^task: *[\"']?([^\s\"'#]+)[\"']?\s*(?:#.*)?$", re.MULTILINE)


def load(request: Request) -> Task:
    """Loads a task.

    Raises:
      UserError: lm_eval is missing, no such task, one that does more than generate one text a problem or runs code, or
        data that cannot be had or does not fit.
    """
    name = request.name
    config = find_config(name)
    count, spec = _choose_shots(name, config, request.spec)
    tables, origin = _read_tables(name, config, request, count)
    with _quiet(name, config, from_hub=tables is None):
        task = _build(config, tables)
        usual = require("lm_eval", "lm_eval.defaults").DEFAULT_OTHER_SEED
        task.set_fewshot_seed(usual if spec.seed is None else spec.seed)
        docs = list(task.eval_docs)
        asked = _ask(task, docs, count, spec.is_chat)
        until = asked(0).arguments[1]["until"]
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        problems = tuple(Problem(i, str(task.doc_to_text(doc)), str(i)) for i, doc in enumerate(docs))
        grader = _Grader(task, docs)
        if not grader.grade("", "0"):
            raise UserError(f"the task {name} has no metric that gives a number; choose another --task")
    if origin is None:
        source = {"source": config["dataset_path"], "sha256": None, "rows": len(docs), "split": _splits(config)[0]}
        origin = source | {"revision": None, "content": hash_rows(docs)}
    provenance = {
        "prompt": dataclasses.asdict(spec),
        "problems": origin,
        "shots": {"chosen_by": "lm_eval", "count": count} if count else None,
        "scoring": {"packages": versions("lm_eval"), "version": str(task.VERSION)},
    }

    def prompt(problem: Problem) -> Any:
        return asked(problem.index).arguments[0]

    return Task(name, problems, provenance, stops, prompt, grader.grade, grader.total)


def find_config(name: str) -> dict[str, Any]:
    """What a task's YAML file says, its functions as names; nothing of its data is read.

    Raises UserError: lm_eval is missing, no such task, or one that is not run here.
    """
    given = name.partition(":")[2]
    path, task = _find_yaml(given)
    with reading(path, "mend the file", (Exception,)):
        config = dict(_open(path).task_index[task].cfg)
    kind = config.get("output_type", "generate_until")
    for odd, what in (
        (kind != "generate_until", f"is of the kind {kind}, which compares given texts"),
        (config.get("unsafe_code"), "runs code that the model wrote, outside the sandbox"),
        (config.get("doc_to_image") or config.get("doc_to_audio"), "asks about pictures or sound"),
        (config.get("repeats", 1) != 1, f"wants {config.get('repeats')} samples a problem"),
    ):
        if odd:
            raise UserError(f"the task {name} {what}; choose one that generates one text a problem (generate_until)")
    return config | {"task": task, "path": path}


@functools.cache
def _list_yamls() -> dict[str, pathlib.Path]:
    """lm_eval's own tasks by name. Its index parses 14000 files in 13 seconds; a look for names takes one."""
    folder = pathlib.Path(require("lm_eval", "lm_eval.tasks").__file__ or "").parent
    found: dict[str, pathlib.Path] = {}
    for path in sorted(folder.glob("**/*.yaml")):
        if match := _NAME.search(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(match[1], path)
    return found


def _find_yaml(given: str) -> tuple[pathlib.Path, str]:
    """The YAML file of a task and the name it has there."""
    known = _list_yamls()
    if given in known:
        return known[given], given
    if not given.endswith((".yaml", ".yml")):
        raise UserError(
            f"lm_eval has no task '{given}'{nearest(given, list(known))}; see `lm_eval ls tasks`, or give a YAML file"
        )
    match = _NAME.search(read_text(given))
    if match is None:
        raise UserError(f"{given}: has no line 'task: NAME' of one task; give a task of lm_eval's format, no group")
    return pathlib.Path(given).resolve(), match[1]


@functools.cache
def _open(path: pathlib.Path) -> Any:
    """lm_eval's TaskManager of the folder that a task's file is in."""
    return require("lm_eval", "lm_eval.tasks").TaskManager(include_path=path.parent, include_defaults=False)


def _choose_shots(name: str, config: Mapping[str, Any], spec: PromptSpec | None) -> tuple[int, PromptSpec]:
    """How many worked examples, and the prompt's style with that number; the task's own where none is asked for."""
    spec = spec or PromptSpec("few_shot", None)
    if spec.style == "boxed":
        raise UserError(f"the task {name} has its own words and no boxed prompt; use --prompt=auto or --prompt=chat")
    if spec.is_chat and config.get("gen_prefix"):
        raise UserError(f"the task {name} begins the answer itself, which no chat template does; use --prompt=auto")
    count = int(config.get("num_fewshot") or 0) if spec.shots is None else spec.shots
    style: Any = spec.style if spec.is_chat else "few_shot" if count else "zero_shot"
    return count, PromptSpec(style, count, spec.seed)


def _splits(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The split that is asked, and that of worked examples; None where the task lists those itself."""
    asked = config.get("test_split") or config.get("validation_split")
    fewshot = config.get("fewshot_config") or {}
    shown = fewshot.get("split") or config.get("fewshot_split")
    if shown is None and "samples" not in fewshot:
        shown = config.get("training_split") or config.get("validation_split") or asked
    return str(asked), shown


def _source(name: str, config: Mapping[str, Any], split: str) -> Source:
    hub_id = str(config.get("dataset_path"))
    return Source(f"the data of {name}", f"rows as those of {hub_id}", hub_id, config.get("dataset_name"), split)


def _read_tables(
    name: str, config: Mapping[str, Any], request: Request, shots: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The splits as `datasets.Dataset`s read from the files that were given, and their origin; None without files."""
    if request.data is None:
        if request.fewshot_data is not None:
            raise UserError(f"--fewshot_data={request.fewshot_data} goes with --data for {name}; give both or neither")
        return None, None
    if config.get("class") is not None:
        raise UserError(f"the task {name} reads its data by code of its own; drop --data")
    asked, shown = _splits(config)
    own = shown is None or shown == asked
    if own and request.fewshot_data is not None:
        where = "lists its worked examples itself" if shown is None else "takes its worked examples from --data"
        raise UserError(f"--fewshot_data={request.fewshot_data}: the task {name} {where}; drop --fewshot_data")
    if shots and not own and request.fewshot_data is None:
        raise UserError(
            f"the task {name} shows {shots} worked examples of its split '{shown}'; give them with --fewshot_data, or "
            "use --prompt=zero_shot"
        )
    rows, origin = load_rows(_source(name, config, asked), request.data)
    tables = {asked: _to_table(rows, request.data)}
    if request.fewshot_data is not None:
        rows, _ = load_rows(_source(name, config, asked), request.fewshot_data, "--fewshot_data")
    if shown is not None and not own:  # lm_eval looks at it without shots too
        tables[shown] = _to_table(rows, request.fewshot_data or request.data)
    return tables, origin


def _to_table(rows: Sequence[tuple[str, Any]], where: str) -> Any:
    with reading(where, "give rows that have the same columns and types"):
        return require("lm_eval", "datasets").Dataset.from_list([row for _, row in rows])


@contextmanager
def _quiet(name: str, config: Mapping[str, Any], from_hub: bool) -> Iterator[None]:
    """Keeps lm_eval's notices off the terminal, and makes one line of what its code raises on data."""
    path = config.get("dataset_path") or ""
    asks = from_hub and "/" in path and not pathlib.Path(path).exists()
    source = _source(name, config, _splits(config)[0])
    try:
        with (
            reading(f"lm_eval's task {name}", "use the data that the task is made for", (Exception,)),
            asking_hub(source, "--data") if asks else quiet(require("lm_eval", "datasets")),
        ):
            yield
    except UserError as error:
        if isinstance(error.__cause__, ImportError):
            raise UserError(f"the task {name} needs another package ({explain(error.__cause__)})") from error
        raise


def _build(config: Mapping[str, Any], tables: Mapping[str, Any] | None) -> Any:
    """lm_eval's Task, with these tables as its data set where there are any."""
    member: Any = {"task": config["task"]}
    if tables is not None:
        member["custom_dataset"] = lambda **_: tables
    loaded = _open(config["path"]).load({"group": "jaxkv", "task": [member]})
    return loaded["tasks"][config["task"]]


def _ask(task: Any, docs: Sequence[Any], shots: int, chat: bool) -> Callable[[int], Any]:
    """Gives lm_eval's Instance of a document, built in the order of the data: each draws examples after the last."""
    built: list[Any] = []

    def get(index: int) -> Any:
        for doc in docs[len(built) : index + 1]:
            context = task.fewshot_context(
                doc,
                num_fewshot=shots,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                chat_template=(lambda messages, **_: messages) if chat else None,
                gen_prefix=task.doc_to_prefix(doc),
            )
            made = task.construct_requests(doc=doc, ctx=context)
            if isinstance(made, list) or made.request_type != "generate_until" or len(made.arguments) != 2:
                raise UserError(
                    f"lm_eval's task {task.task_name} asks more than one text of a problem; choose another --task"
                )
            built.append(made)
        return built[index]

    return get


class _Grader:
    """Filters and metrics of a task. A gold is the number of a document."""

    def __init__(self, task: Any, docs: Sequence[Any]):
        self._task, self._docs = task, docs
        self._measure = functools.lru_cache(maxsize=4096)(self._measure_once)  # labels are asked for twice
        self._mean = require("lm_eval", "lm_eval.api.metrics").mean

    def _measure_once(self, text: str, gold: str) -> list[tuple[str, str, Any, Any]]:
        """Metric, filter, what the filter read, and the metric's value, as lm_eval's evaluator gets them."""
        doc = self._docs[int(gold)]
        instance = require("lm_eval", "lm_eval.api.instance").Instance("generate_until", doc, (), 0, resps=[text])
        found = []
        where = f"the answer to problem {gold} by the scorers of lm_eval's task {self._task.task_name}"
        with reading(where, "use another --task, or mend this one", (Exception,)):
            for ensemble in self._task._filters:
                ensemble.apply([instance])
                read = instance.filtered_resps[ensemble.name]
                values = self._task.process_results(doc, [read])
                found += [(metric, ensemble.name, read, value) for metric, value in values.items()]
        return found

    def _aggregate(self, metric: str, values: Sequence[Any]) -> float | None:
        """What lm_eval makes of a metric's values; None if that is no number."""
        found = self._task.aggregation().get(metric, self._mean)(list(values))
        return float(found) if isinstance(found, int | float) or hasattr(found, "dtype") else None

    def grade(self, text: str, gold: str) -> Scores:
        """Scores a continuation by each metric after each filter."""
        scores: Scores = {}
        for metric, filtered, read, value in self._measure(text, gold):
            number = self._aggregate(metric, [value])
            if number is None:
                continue
            best = 1.0 if self._task.higher_is_better().get(metric, True) else 0.0
            score = {"answer": read if isinstance(read, str) else str(read), "correct": number == best}
            if number not in (0.0, 1.0) and math.isfinite(number):
                score["value"] = number
            scores[f"{metric},{filtered}"] = score
        return scores

    def total(self, texts: Mapping[str, str]) -> dict[str, float]:
        """lm_eval's results for texts by gold: METRIC,FILTER -> aggregated value."""
        values: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
        for gold, text in texts.items():
            for metric, filtered, _, value in self._measure(text, gold):
                values[metric, filtered].append(value)
        totals = {f"{metric},{kept}": self._aggregate(metric, found) for (metric, kept), found in values.items()}
        return {name: value for name, value in totals.items() if value is not None}
