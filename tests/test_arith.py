import hashlib
import json
import re
from collections import Counter
from fractions import Fraction

import pytest

from jaxkv.errors import UserError
from jaxkv.tasks import arith, load_task
from jaxkv.tasks.gsm8k import PromptSpec, k_shot
from jaxkv.tasks.scoring import STOPS, TURN_ENDS, score
from jaxkv.tasks.sources import hash_problems

EQUATION = re.compile(r"(\d+(?:[-+*/]\d+)+)=(\d+)")
UNITS = {2, 3, 7, 12, 60, 100, 1000}  # numbers a step may use though the question does not hold them
TRAIN = 8000  # problems of the training split that are looked at
LONGEST = 45  # words of a question
FIRST_100 = "d0d0ad4255a966b17fc889f6ac8718d1f054b9301cd17035873e933b4ccc6bbc"


@pytest.fixture(scope="module")
def train():
    return arith.generate("train", TRAIN)


@pytest.fixture(scope="module")
def test_set():
    return arith.generate("test", arith.TEST_COUNT)


@pytest.fixture(scope="module")
def by_template():
    """Problems of both splits under the template they come from."""
    found = {template.name: [] for template in arith.ALL}
    for split in arith.SPLITS:
        for index in range(4000 if split == "train" else 500):
            problem, key = arith._make(split, 7, index, set())
            assert arith.find_split(key) == split
            found[key[0]].append(problem)
    return found


def evaluate(text):
    """Value of a chain of + - * / over integers."""
    return eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})


def test_templates(by_template):
    assert len(arith.ALL) >= 40
    assert len({template.name for template in arith.ALL}) == len(arith.ALL)
    assert len({template.skill for template in arith.ALL}) >= 10
    assert min(map(len, by_template.values())) >= 20
    # Enough different problems of each that neither split is a handful of them.
    for name, problems in by_template.items():
        numbers = {tuple(re.findall(r"\d+", problem.question)) for problem in problems}
        assert len(numbers) >= 0.6 * len(problems), name


def test_every_solution_is_right(train, test_set):
    for problem in (*train, *test_set):
        *steps, last = problem.solution.split("\n")
        assert 1 <= len(steps) <= 5
        known = UNITS | {int(n) for n in re.findall(r"\d+", problem.question)}
        results = []
        for step in steps:
            ((left, right),) = EQUATION.findall(step)
            assert step.count("=") == 1
            assert evaluate(left) == int(right), step
            assert {int(n) for n in re.findall(r"\d+", left)} <= known, problem
            known.add(int(right))
            results.append(right)
        assert last == f"#### {results[-1]}"
        assert problem.answer == results[-1]


def test_text(by_template):
    for name, problems in by_template.items():
        for problem in problems:
            text = f"{problem.question}\n{problem.solution}"
            assert problem.question.endswith("?"), name
            assert len(problem.question.split()) <= LONGEST, name
            assert not re.search(r"[{}<>|]|  | \n|\b0\d", text), text
            assert all(line[0].isupper() or line[0].isdigit() for line in problem.solution.split("\n")[:-1]), text
            assert not re.search(r"(?<![\d/])1 (?:more )?[a-z]+s (?!times)", text), text
            assert re.search(r"\bHow\b|\bWhat\b|\bAfter how\b|\bFor how\b", text)


def test_gold_scores_correct(train, test_set):
    for problem in (*train[:1000], *test_set):
        assert all(result["correct"] for result in score(problem.solution, problem.answer).values())


def test_sizes(test_set):
    """One to four digits, and more than one step in most: not a task that is always easy."""
    digits = Counter(len(problem.answer) for problem in test_set)
    assert set(digits) >= {1, 2, 3, 4}
    assert max(digits) <= 5
    assert digits[1] < 0.25 * len(test_set)
    assert sum(problem.solution.count("\n") >= 2 for problem in test_set) > 0.5 * len(test_set)


def test_splits_are_disjoint(train, test_set):
    assert len(test_set) == 500
    assert len({problem.question for problem in test_set}) == 500
    assert not {problem.question for problem in test_set} & {problem.question for problem in train}
    counts = {"train": TRAIN, "test": 500}
    keys = {split: {arith._make(split, 0, index, set())[1] for index in range(counts[split])} for split in counts}
    assert all(arith.find_split(key) == split for split in keys for key in keys[split])
    assert not keys["train"] & keys["test"]


def test_a_question_has_one_template(by_template):
    owner = {}
    for name, problems in by_template.items():
        for problem in problems:
            assert owner.setdefault(re.sub(r"\d+", "0", problem.question), name) == name


def test_deterministic():
    first = arith.generate("train", 100)
    assert hash_problems(first) == FIRST_100
    assert arith.generate("train", 120)[:100] == first
    assert [problem.index for problem in first] == list(range(100))
    assert not {p.question for p in arith.generate("train", 100, seed=1)} & {p.question for p in first}
    lines = "".join(json.dumps([p.question, p.solution]) + "\n" for p in first)
    assert hashlib.sha256(lines.encode()).hexdigest() == FIRST_100


def test_generate_refuses():
    with pytest.raises(UserError, match="unknown split"):
        arith.generate("dev", 1)


@pytest.mark.parametrize(
    ("noun", "plural"),
    [("box", "boxes"), ("lily", "lilies"), ("day", "days"), ("child", "children"), ("sandwich", "sandwiches")],
)
def test_plural(noun, plural):
    assert arith.plural(noun) == plural


def test_task(test_set):
    task = load_task("arith")
    assert task.problems == test_set
    assert task.stops == STOPS
    assert task.prompt(task.problems[0]) == k_shot(task.problems[0], arith.generate("train", 8))
    gold = task.problems[0]
    assert task.score(f" {gold.solution}\n\nQuestion: 5", gold.answer)["strict"]["correct"]
    problems = task.provenance["problems"]
    assert problems == {
        "source": "generated",
        "generator": arith.VERSION,
        "split": "test",
        "seed": 0,
        "rows": 500,
        "sha256": hash_problems(test_set),
    }
    assert task.provenance["shots"]["indices"] == list(range(8))
    assert json.loads(json.dumps(task.provenance)) == task.provenance


def test_task_prompt_styles():
    for style in ("chat", "boxed"):
        chat = load_task("arith", spec=PromptSpec(style, 2, seed=3))
        assert [message["role"] for message in chat.prompt(chat.problems[0])] == ["user", "assistant"] * 2 + ["user"]
        assert chat.stops == TURN_ENDS
    zero = load_task("arith", spec=PromptSpec("zero_shot"))
    assert zero.provenance["shots"] is None
    assert zero.prompt(zero.problems[-1]).endswith("\nAnswer:")
    assert len(zero.problems) == 500


@pytest.mark.parametrize("flag", ["data", "fewshot_data"])
def test_task_needs_no_data(flag):
    with pytest.raises(UserError, match=f"--{flag}=a.jsonl: .* needs no data"):
        load_task("arith", **{flag: "a.jsonl"})
