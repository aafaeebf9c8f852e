import dataclasses
import hashlib
import json
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from checkpoint_files import named_file
from hypothesis import given
from hypothesis import strategies as st
from task_files import serve, write_rows

from jaxkv.errors import UserError
from jaxkv.tasks import load_task
from jaxkv.tasks.answers import extract_numeric
from jaxkv.tasks.gsm8k import Problem, PromptSpec, build_prompt, choose_shots, load_problems, show_boxed_solution
from jaxkv.tasks.numerals import canonical, find_numbers, normalize, parse_number
from jaxkv.tasks.scoring import STOPS, TURN_ENDS, cut_at_stop, extract_flexible, label_change, score

DATA = Path(__file__).parent / "data"
PROBLEMS, TRAIN = str(DATA / "problems.jsonl"), str(DATA / "train.jsonl")
ASKED, SHOWN = load_problems(PROBLEMS)[0], load_problems(TRAIN, "train")[0]


# Numbers

# fmt: off
NUMBERS = {
    # A minus is a sign where no operand stands before it.
    "10-5": "10 5", "10 - 5": "10 5", "10 -5": "10 5", "10\u20135": "10 5", "x-5 and (3)-4": "5 3 4", "= -5": "-5",
    "5 - 15 = - 10": "5 15 -10", "is -$5, $-6, -7": "-5 -6 -7", "negative 18": "-18", "\u221218 and \u20133": "-18 -3",
    # Full stops and commas.
    "...": "", "so ...18": "18", ",": "", "$ , . -": "", "18.": "18", "18.5.": "18.5", ".5": "0.5",
    "18. That is all": "18", "1, 2, 3": "1 2 3", "1,2,3": "1 2 3",
    # Thousands.
    "1,234,567.80": "1234567.80", "1 234": "1234", "1\u2009234\u2009567": "1234567", "1\u202f234": "1234",
    "1\u00a0234": "1234", "1'234 and 1_234": "1234 1234", "1{,}234 and 5\\,678": "1234 5678", "12,34,567": "1234567",
    "7 8": "7 8", "2020 300": "2020 300", "0 234": "0 234",
    # Names, and labels of a list.
    "7 (see step 2)": "7", "as in Equation (3)": "", "H2O, CO2, x2": "", "5x18": "5 18",
    "1. Count 5.\n2. Add 3.\n3.": "5 3",
    # Currency, percent, exponents, other digits.
    "USD 18, Rs. 500, US$7": "18 500 7", "18%": "18", "+18": "18", "1.8e1 and 2e3": "18 2000", "1e999999": "1 999999",
    "\uff11\uff18": "18",
}
# fmt: on


@pytest.mark.parametrize("text", NUMBERS)
def test_find_numbers(text):
    assert [n.text for n in find_numbers(normalize(text))] == NUMBERS[text].split()


@given(
    st.integers(-(10**18), 10**18),
    st.sampled_from(["", ",", " ", "\u2009", "\u202f", "\u00a0", "'", "_"]),
    st.sampled_from(["", "$", "\u20ac", "$ "]),
    st.sampled_from(["-", "\u2212"]),
    st.sampled_from(["", "."]),
)
def test_any_integer_parses_back(value, separator, currency, minus, stop):
    text = (minus if value < 0 else "") + currency + f"{abs(value):,}".replace(",", separator) + stop
    assert parse_number(text) == value
    for lead in ("#### ", "####", "The answer is ", "Answer: ", "5 - 3 = ", "so she has "):
        assert extract_numeric(lead + text) == value, lead
        assert extract_flexible(lead + text) == str(value), lead


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=3))
def test_any_decimal_parses_back(value):
    assert parse_number(format(value, "f")) == value
    assert parse_number(canonical(value)) == value
    assert extract_numeric(f"The answer is {value:,f}.") == value


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_difference_is_never_a_negative_number(a, b):
    for text in (f"{a}-{b}", f"{a} - {b}", f"{a} -{b}", f"{a}\u2212{b}"):
        assert all(n.value >= 0 for n in find_numbers(normalize(text)))


@given(st.text(max_size=200))
def test_any_text_is_scored(text):
    result = score(text, "18")
    assert all(isinstance(r["correct"], bool) and (r["answer"] is None) <= (not r["correct"]) for r in result.values())


@given(st.text(alphabet="0123456789.,-$ #=/()\nanswer is:", max_size=120))
def test_any_digits_are_scored(text):
    for result in score(text, "-3").values():
        assert result["answer"] is None or parse_number(result["answer"]) is not None


@pytest.mark.parametrize("text", ["two", "7 8", "", "1/2", "18 eggs", "...", ","])
def test_parse_number_refuses(text):
    assert parse_number(text) is None


# Scores


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "numeric"),
    [
        ("The answer is 18.", None, "18", "18"),
        ("#### 18", "18", "18", "18"),
        ("#### 18.", "18", "18", "18"),
        ("#### $18", None, "18", "18"),
        ("####18", None, "18", "18"),
        ("#### 18.00", "18.00", "18.00", "18"),
        ("#### 2,125", "2125", "2125", "2125"),
        ("#### 1 234", "1", "1234", "1234"),
        ("#### \u221210", None, "-10", "-10"),
        ("#### -10", "-10", "-10", "-10"),
        ("#### - 10", None, "-10", "-10"),
        ("#### **18**", None, "18", "18"),
        ("#### 18\n\nQuestion: Tom has 5 pens.\nAnswer: 5\n#### 5", "18", "18", "18"),
        ("#### 18\n\nTom has 5 pens. How many?", "18", "5", "18"),
        ("She has 10-5", None, "5", "5"),
        ("I do not know...", None, None, None),
        ("#### ...", None, None, None),
        ("#### ,", None, None, None),
        ("#### 20-30", "20", "30", None),
        ("The answer is ,", None, None, None),
        ("The answer is 7 (see step 2)", None, "7", "7"),
        ("#### 7 (see step 2)", "7", "7", "7"),
        ("She needs 7 (3 red and 4 blue).", None, "4", "7"),
        ("She needs (18)", None, "18", "18"),
        ("#### 9 * 2 = 18", "9", "18", "18"),
        ("#### x = 18", None, "18", "18"),
        ("#### Answer: 18", None, "18", "18"),
        ("#### Step 1: add\n5+3=8\n#### 8", "8", "8", "8"),
        ("#### 1. Add\n5+3=8\n#### 2. Halve\n8/2=4", "1", "4", "4"),
        ("#### 4\n#### 5", "4", "5", "4"),
        ("#### .\n#### 5", None, "5", "5"),
        ("so \\boxed{18}. That uses 3 steps.", None, "3", "18"),
        ("so \\boxed{1{,}234}", None, "1234", "1234"),
        ("\\boxed{\\frac{1}{2}}", None, "2", "0.5"),
        ("The answer is 2 1/2", None, "2", "2.5"),
        ("The answer is 2 million.", None, "2", "2000000"),
        ("The answer is $18 a day, so 126 in 7 days.", None, "7", "18"),
        ("The answer is not 5 but 7.", None, "7", "7"),
        ("The final answer is therefore, 18 eggs.", None, "18", "18"),
        ("**Answer:** 18 dollars\n\nCheck: 9*2 uses 2 facts", None, "2", "18"),
        ("Answer: 16 - 3 = 13 eggs. 13 - 4 = 9. 9*2 = 18.", None, "18", "18"),
        ("Answer: Jane has 16 eggs. She sells 9 for 18.", None, "18", "18"),
    ],
)
def test_traps(text, strict, flexible, numeric):
    assert [result["answer"] for result in score(text, "0").values()] == [strict, flexible, numeric]


def test_scores_compare_what_they_say():
    result = score("#### 18.00", "18")
    assert not result["strict"]["correct"]
    assert not result["flexible"]["correct"]
    assert result["numeric"] == {"answer": "18", "correct": True}
    for gold, text in (("2,125", "#### 2125"), ("2125", "#### 2,125"), ("-3", "#### -3"), ("-3", "#### \u22123")):
        assert score(text, gold)["numeric"]["correct"]
        assert score(text, gold)["flexible"]["correct"]
    assert not score("#### 3", "-3")["numeric"]["correct"]
    with pytest.raises(UserError, match="gold answer"):
        score("#### 3", "three")


def test_large_numbers_are_exact():
    big = "9" * 60
    assert score(f"#### {big}", big)["numeric"]["correct"]
    assert not score(f"#### {big[:-1]}8", big)["numeric"]["correct"]


def test_cut_at_stop():
    assert cut_at_stop("a\n\nQuestion: b\n</s>") == "a\n\n"
    assert cut_at_stop("a</s> Question:") == "a"
    assert cut_at_stop("a", STOPS) == cut_at_stop("a", ()) == "a"
    assert score("Question: restated. #### 4", "4", TURN_ENDS)["strict"]["correct"]


@pytest.mark.parametrize(
    ("a", "b", "scorer", "kind"),
    [
        ("#### 18", "#### 18", "strict", "same"),
        ("#### 17", "#### 16", "strict", "same"),
        ("#### 18", "#### $18", "strict", "extraction_only"),
        ("#### 18", "The answer is 18.", "strict", "extraction_only"),
        ("#### 18", "#### 18.00", "flexible", "extraction_only"),
        ("#### 18", "#### $18", "numeric", "same"),
        ("#### 18", "#### 17", "strict", "answer_changed"),
        ("#### 18", "I do not know", "numeric", "answer_changed"),
        ("#### 18-30", "I do not know", "strict", "answer_changed"),  # neither settles on a value
    ],
)
def test_label_change(a, b, scorer, kind):
    a, b = score(a, "18"), score(b, "18")
    assert label_change(a, b)[scorer] == label_change(b, a)[scorer] == kind


# Data


ROWS = [
    {"question": "a\u2028b", "answer": "x\n#### 1,200", "id": 1},
    {"question": "2020-01-01", "answer": "#### -3", "id": "two"},
]


def test_readers_agree(tmp_path, monkeypatch):
    jsonl, parquet = write_rows(tmp_path / "a.jsonl", ROWS), str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**r, "id": str(r["id"])} for r in ROWS]), parquet)
    monkeypatch.setitem(sys.modules, "datasets", None)  # files are read without it
    (problems, origin), same, other = map(load_problems, (jsonl, parquet, PROBLEMS))
    assert problems == same[0]
    assert problems == (Problem(0, "a\u2028b", "1200", "x\n#### 1,200"), Problem(1, "2020-01-01", "-3", "#### -3"))
    assert origin["fingerprint"] == same[1]["fingerprint"] != other[1]["fingerprint"]
    sha = hashlib.sha256(Path(jsonl).read_bytes()).hexdigest()
    assert (origin["source"], origin["sha256"], origin["rows"], origin["split"]) == (jsonl, sha, 2, "test")


def test_hub_without_network_or_package(monkeypatch):
    serve(monkeypatch, ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"))
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set\).*; or pass --data FILE, a \.jsonl or \.parquet file"):
        load_problems(None)
    with pytest.raises(UserError, match="pass --fewshot_data FILE"):
        load_task("gsm8k", data=PROBLEMS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_problems(None)


# Prompts


def test_few_shot_text():
    spec = PromptSpec("few_shot", shots=2)
    shots = choose_shots(spec, SHOWN, ASKED[:1])
    assert shots == SHOWN[:2]
    assert build_prompt(spec, ASKED[0], shots) == (
        "Question: Mara has 9 red beads and 4 times as many blue ones. How many beads does she have?\n"
        "Answer: She has 9*4=36 blue beads.\nIn all she has 9+36=45 beads.\n#### 45\n\n"
        "Question: A bus carries 52 people. At a stop 17 leave and 8 get on. How many people are on the bus?\n"
        "Answer: After 17 leave there are 52-17=35 people.\nThen there are 35+8=43 people.\n#### 43\n\n"
        "Question: Nadia fills 7 jars with 12 buttons each. She gives 20 buttons to her cousin. "
        "How many buttons does she keep?\nAnswer:"
    )


def test_zero_shot_and_chat():
    problem = ASKED[1]
    assert build_prompt(PromptSpec("zero_shot"), problem) == f"Question: {problem.question}\nAnswer:"
    (message,) = build_prompt(PromptSpec("chat"), problem)
    assert message["role"] == "user"
    assert message["content"].startswith(problem.question)
    assert "####" in message["content"]
    messages = build_prompt(PromptSpec("chat", 2), problem, SHOWN[:2])
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert "<<" not in json.dumps(messages)


def test_boxed():
    request = "\nPlease reason step by step, and put your final answer within \\boxed{}."  # of Qwen2.5-Math
    question = {"role": "user", "content": ASKED[1].question + request}
    shown = "She has 9*4=36 blue beads.\nIn all she has 9+36=45 beads.\nThe final answer is \\boxed{45}."
    assert build_prompt(PromptSpec("boxed"), ASKED[1]) == [question]
    assert build_prompt(PromptSpec("boxed", 1), ASKED[1], SHOWN[:1]) == [
        {"role": "user", "content": SHOWN[0].question + request},
        {"role": "assistant", "content": shown},
        question,
    ]


def test_boxed_shots_hold_their_answers():
    for shot in SHOWN:
        shown = show_boxed_solution(shot)
        assert shown.endswith(f"\\boxed{{{shot.answer}}}.")
        assert "#" not in shown
        assert score(shown, shot.answer)["numeric"]["correct"]


def test_seeded_shots():
    chosen = [p.index for p in choose_shots(PromptSpec("few_shot", 4, seed=0), SHOWN)]
    assert chosen == [p.index for p in choose_shots(PromptSpec("few_shot", 8, seed=0), SHOWN)][:4]
    assert chosen != [p.index for p in choose_shots(PromptSpec("few_shot", 4, seed=1), SHOWN)]
    assert len(set(chosen)) == 4


def test_shots_never_hold_a_test_problem():
    spec = PromptSpec("few_shot", 1)
    with pytest.raises(UserError, match="12 of the few-shot problems are also asked"):
        load_task("gsm8k", data=PROBLEMS, fewshot_data=PROBLEMS, spec=spec)
    disguised = dataclasses.replace(ASKED[0], question=ASKED[0].question.upper() + "\n")
    with pytest.raises(UserError, match="1 of the few-shot problems are also asked"):
        choose_shots(spec, [disguised], ASKED)
    with pytest.raises(UserError, match="20 shots wanted"):
        choose_shots(PromptSpec("few_shot", 20), ASKED)


@pytest.mark.parametrize("spec", [("zero_shot", 1), ("few_shot", 0), ("chat", -1), ("boxed", -1)])
def test_prompt_spec_refuses(spec):
    with pytest.raises(UserError, match="cannot have"):
        PromptSpec(*spec)


# Task


def test_task():
    task = load_task("gsm8k", data=PROBLEMS, fewshot_data=TRAIN)
    assert [p.answer for p in task.problems[:3]] == ["64", "30", "60"]
    assert task.prompt(task.problems[0]).count("Question:") == 9
    assert task.stops == STOPS
    assert task.score(" 84-20=64\n#### 64\n\nQuestion: 5", task.problems[0].answer)["strict"]["correct"]
    assert task.label_change("#### 64", "####64", task.problems[0].answer)["strict"] == "extraction_only"
    assert task.provenance["shots"]["indices"] == list(range(8))
    assert json.loads(json.dumps(task.provenance)) == task.provenance
    assert load_task("gsm8k", data=PROBLEMS, spec=PromptSpec("chat")).provenance["shots"] is None
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        load_task("gsm8")


def test_own_problems_score_correct():
    for problem in (*ASKED, *SHOWN):
        assert all(r["correct"] for r in score(problem.solution, problem.answer).values())


@pytest.mark.weights
def test_public_test_file():
    folder = named_file("JAXKV_GSM8K_DIR")
    problems, origin = load_problems(str(folder / "gsm8k_test.jsonl"))
    assert origin["rows"] == len(problems) == 1319
    golds = [p.solution.rpartition("####")[2] for p in problems]
    assert sum("," in gold for gold in golds) == 14
    assert sum(Decimal(p.answer) < 0 for p in problems) == 2
    assert [p.index for p in problems if not all(r["correct"] for r in score(p.solution, p.answer).values())] == []
    train, _ = load_problems(str(folder / "gsm8k_train.jsonl"), "train")
    assert len(train) == 7473
    assert len(choose_shots(PromptSpec("few_shot", 8, seed=0), train, problems)) == 8
