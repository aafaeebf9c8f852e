import dataclasses
import hashlib
import json
import os
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.errors import UserError
from jaxkv.tasks import gsm8k, load_task
from jaxkv.tasks.answers import extract_numeric
from jaxkv.tasks.gsm8k import Problem, PromptSpec, build_prompt, choose_shots, load_problems, stop_strings
from jaxkv.tasks.numerals import canonical, find_numbers, normalize, parse_number
from jaxkv.tasks.scoring import (
    STOPS,
    TURN_ENDS,
    cut_at_stop,
    extract_flexible,
    extract_strict,
    label_change,
    score,
)

DATA = Path(__file__).parent / "data"
PROBLEMS, TRAIN = str(DATA / "problems.jsonl"), str(DATA / "train.jsonl")


def read(text):
    """Answers by scorer, as strings."""
    return {name: result["answer"] for name, result in score(text, "0").items()}


# Numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("10-5", ["10", "5"]),
        ("10 - 5", ["10", "5"]),
        ("10 -5", ["10", "5"]),
        ("x-5 and (3)-4", ["5", "3", "4"]),
        ("= -5", ["-5"]),
        ("5 - 15 = - 10", ["5", "15", "-10"]),
        ("is -$5, $-6, -7", ["-5", "-6", "-7"]),
        ("negative 18", ["-18"]),
        ("\u221218 and \u20133", ["-18", "-3"]),
        ("10\u20135", ["10", "5"]),
        ("...", []),
        ("so ...18", ["18"]),
        (",", []),
        ("$ , . -", []),
        ("18.", ["18"]),
        ("18.5.", ["18.5"]),
        (".5", ["0.5"]),
        ("1,234,567.80", ["1234567.80"]),
        ("1 234", ["1234"]),
        ("1\u2009234\u2009567", ["1234567"]),
        ("1\u202f234", ["1234"]),
        ("1\u00a0234", ["1234"]),
        ("1'234 and 1_234", ["1234", "1234"]),
        ("1{,}234 and 5\\,678", ["1234", "5678"]),
        ("12,34,567", ["1234567"]),
        ("7 8", ["7", "8"]),
        ("2020 300", ["2020", "300"]),
        ("1, 2, 3", ["1", "2", "3"]),
        ("1,2,3", ["1", "2", "3"]),
        ("0 234", ["0", "234"]),
        ("7 (see step 2)", ["7"]),
        ("as in Equation (3)", []),
        ("H2O, CO2, x2", []),
        ("5x18", ["5", "18"]),
        ("USD 18, Rs. 500, US$7", ["18", "500", "7"]),
        ("18%", ["18"]),
        ("+18", ["18"]),
        ("1.8e1 and 2e3", ["18", "2000"]),
        ("1e999999", ["1", "999999"]),
        ("\uff11\uff18", ["18"]),
        ("1. Count 5.\n2. Add 3.\n3.", ["5", "3"]),
        ("18. That is all", ["18"]),
    ],
)
def test_find_numbers(text, numbers):
    assert [n.text for n in find_numbers(normalize(text))] == numbers


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
        ("The answer is 18", None, "18", "18"),
        ("#### 18", "18", "18", "18"),
        ("#### 18.", "18", "18", "18"),
        ("#### $18", None, "18", "18"),
        ("####18", None, "18", "18"),
        ("#### 18.00", "18.00", "18.00", "18"),
        ("#### 2,125", "2125", "2125", "2125"),
        ("#### 1 234", "1", "1234", "1234"),
        ("#### 1\u2009234", "1", "1234", "1234"),
        ("#### \u221210", None, "-10", "-10"),
        ("#### -10", "-10", "-10", "-10"),
        ("#### - 10", None, "-10", "-10"),
        ("#### **18**", None, "18", "18"),
        ("#### 18\n\nQuestion: Tom has 5 pens.\nAnswer: 5\n#### 5", "18", "18", "18"),
        ("#### 18\n\nTom has 5 pens. How many?", "18", "5", "18"),
        ("She has 10-5", None, "5", "5"),
        ("The answer is 10-5", None, "5", "5"),
        ("I do not know...", None, None, None),
        ("#### ...", None, None, None),
        ("#### ,", None, None, None),
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
    assert read(text) == {"strict": strict, "flexible": flexible, "numeric": numeric}


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
    assert extract_numeric("#### 1/0") is None


def test_strict_takes_the_first_marker():
    assert extract_strict("#### 4\n#### 5") == "4"
    assert extract_strict("#### .\n#### 5") is None


def test_cut_at_stop():
    assert cut_at_stop("a\n\nQuestion: b\n</s>") == "a\n\n"
    assert cut_at_stop("a</s> Question:") == "a"
    assert cut_at_stop("a", STOPS) == cut_at_stop("a", ()) == "a"
    assert score("Question: restated. #### 4", "4", stop_strings(PromptSpec("chat")))["strict"]["correct"]


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


def write(path, rows, newline="\n"):
    path.write_bytes((newline.join(json.dumps(r, ensure_ascii=False) for r in rows) + newline).encode())
    return str(path)


ROWS = [
    {"question": "a\u2028b", "answer": "x\n#### 1,200", "id": 1},
    {"question": "2020-01-01", "answer": "#### -3", "id": "two"},
]


def test_readers_agree(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    jsonl = write(tmp_path / "a.jsonl", ROWS)
    windows = tmp_path / "b.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + Path(jsonl).read_bytes().replace(b"\n", b"\r\n\r\n"))
    parquet = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**r, "id": str(r["id"])} for r in ROWS]), parquet)
    paths = [jsonl, str(windows), parquet, PROBLEMS]
    monkeypatch.setitem(sys.modules, "datasets", None)  # files are read without it
    read = [load_problems(path) for path in paths]
    assert read[0][1]["fingerprint"] == read[1][1]["fingerprint"] == read[2][1]["fingerprint"]
    assert read[0][1]["fingerprint"] != read[3][1]["fingerprint"]
    assert read[0][0] == read[1][0] == read[2][0]
    assert read[0][0] == (
        Problem(0, "a\u2028b", "1200", "x\n#### 1,200"),
        Problem(1, "2020-01-01", "-3", "#### -3"),
    )
    sha = hashlib.sha256(Path(jsonl).read_bytes()).hexdigest()
    origin = read[0][1]
    assert (origin["source"], origin["sha256"], origin["rows"], origin["split"]) == (jsonl, sha, 2, "test")


GOOD = b'{"question": "q", "answer": "#### 1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b'{"question": "q"}', "line 2: object missing required field `answer`"),
        ("a.jsonl", GOOD + b'{"question": "", "answer": "#### 1"}', "line 2: field question: .* that is not blank"),
        ("a.jsonl", GOOD + b'{"question": "q", "answer": "18"}\n', "line 2: the answer does not end in '#### N'"),
        ("a.jsonl", GOOD + b'{"question": "q", "answer": "#### ten"}\n', "line 2: the answer does not end in"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.parquet", b"no parquet", "cannot be read .*not a parquet file.*give a .jsonl file"),
    ],
)
def test_faults_of_a_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_problems(str(path))
    assert str(path) in str(caught.value)


def test_hub_without_network_or_package(monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set\).*; or pass --data FILE, a \.jsonl or \.parquet file"):
        load_problems(None)
    with pytest.raises(UserError, match="pass --fewshot_data FILE"):
        load_task("gsm8k", data=PROBLEMS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_problems(None)


# Prompts


def test_few_shot_text():
    train, _ = load_problems(TRAIN, "train")
    problem = load_problems(PROBLEMS)[0][0]
    spec = PromptSpec("few_shot", shots=2)
    shots = choose_shots(spec, train, [problem])
    assert shots == train[:2]
    assert build_prompt(spec, problem, shots) == (
        "Question: Mara has 9 red beads and 4 times as many blue ones. How many beads does she have?\n"
        "Answer: She has 9*4=36 blue beads.\nIn all she has 9+36=45 beads.\n#### 45\n\n"
        "Question: A bus carries 52 people. At a stop 17 leave and 8 get on. How many people are on the bus?\n"
        "Answer: After 17 leave there are 52-17=35 people.\nThen there are 35+8=43 people.\n#### 43\n\n"
        "Question: Nadia fills 7 jars with 12 buttons each. She gives 20 buttons to her cousin. "
        "How many buttons does she keep?\nAnswer:"
    )


def test_zero_shot_and_chat():
    problem = load_problems(PROBLEMS)[0][1]
    assert build_prompt(PromptSpec("zero_shot"), problem) == f"Question: {problem.question}\nAnswer:"
    (message,) = build_prompt(PromptSpec("chat"), problem)
    assert message["role"] == "user"
    assert message["content"].startswith(problem.question)
    assert "####" in message["content"]
    train, _ = load_problems(TRAIN, "train")
    messages = build_prompt(PromptSpec("chat", 2), problem, train[:2])
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert "<<" not in json.dumps(messages)


def test_boxed():
    problem = load_problems(PROBLEMS)[0][1]
    train, _ = load_problems(TRAIN, "train")
    request = "\nPlease reason step by step, and put your final answer within \\boxed{}."  # of Qwen2.5-Math
    question = {"role": "user", "content": problem.question + request}
    assert build_prompt(PromptSpec("boxed"), problem) == [question]
    assert build_prompt(PromptSpec("boxed", 1), problem, train[:1]) == [
        {"role": "user", "content": train[0].question + request},
        {
            "role": "assistant",
            "content": "She has 9*4=36 blue beads.\nIn all she has 9+36=45 beads.\nThe final answer is \\boxed{45}.",
        },
        question,
    ]
    assert stop_strings(PromptSpec("boxed")) == TURN_ENDS


def test_boxed_shots_hold_their_answers():
    for shot in load_problems(TRAIN, "train")[0]:
        shown = gsm8k.show_boxed_solution(shot)
        assert shown.endswith(f"\\boxed{{{shot.answer}}}.")
        assert "#" not in shown
        assert score(shown, shot.answer)["numeric"]["correct"]


def test_only_word_problems_have_the_boxed_style():
    task = load_task("arith", spec=PromptSpec("boxed", 2), limit=1)
    assert [m["role"] for m in task.prompt(task.problems[0])] == ["user", "assistant"] * 2 + ["user"]
    with pytest.raises(UserError, match="no boxed prompt; use --prompt=zero_shot or --prompt=chat"):
        load_task("humaneval", spec=PromptSpec("boxed"), allow_code_execution=True)


def test_seeded_shots():
    train, _ = load_problems(TRAIN, "train")
    chosen = [p.index for p in choose_shots(PromptSpec("few_shot", 4, seed=0), train)]
    assert chosen == [p.index for p in choose_shots(PromptSpec("few_shot", 8, seed=0), train)][:4]
    assert chosen != [p.index for p in choose_shots(PromptSpec("few_shot", 4, seed=1), train)]
    assert len(set(chosen)) == 4


def test_shots_never_hold_a_test_problem():
    problems, _ = load_problems(PROBLEMS)
    spec = PromptSpec("few_shot", 1)
    with pytest.raises(UserError, match="12 of the few-shot problems are also asked"):
        load_task("gsm8k", data=PROBLEMS, fewshot_data=PROBLEMS, spec=spec)
    disguised = dataclasses.replace(problems[0], question=problems[0].question.upper() + "\n")
    with pytest.raises(UserError, match="own worked examples"):
        build_prompt(spec, problems[0], [disguised])
    with pytest.raises(UserError, match="wants 1 shots and got 0"):
        build_prompt(spec, problems[0], ())
    with pytest.raises(UserError, match="20 shots wanted"):
        choose_shots(PromptSpec("few_shot", 20), problems)


@pytest.mark.parametrize("spec", [("zero_shot", 1), ("few_shot", 0), ("chat", -1), ("boxed", -1)])
def test_prompt_spec_refuses(spec):
    with pytest.raises(UserError, match="cannot have"):
        PromptSpec(*spec)


def test_prompt_style_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'few_shot'"):
        PromptSpec("fewshot", 1)


# Task


def test_task():
    task = load_task("gsm8k", data=PROBLEMS, fewshot_data=TRAIN, limit=3)
    assert [p.answer for p in task.problems] == ["64", "30", "60"]
    assert task.prompt(task.problems[0]).count("Question:") == 9
    assert task.stops == STOPS
    assert task.score(" 84-20=64\n#### 64\n\nQuestion: 5", task.problems[0].answer)["strict"]["correct"]
    assert task.label_change("#### 64", "####64", task.problems[0].answer)["strict"] == "extraction_only"
    assert task.provenance["shots"]["indices"] == list(range(8))
    assert json.loads(json.dumps(task.provenance)) == task.provenance
    assert load_task("gsm8k", data=PROBLEMS, spec=PromptSpec("chat")).provenance["shots"] is None


def test_task_faults():
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        load_task("gsm8")
    with pytest.raises(UserError, match="limit of 0"):
        load_task("gsm8k", data=PROBLEMS, limit=0)


@pytest.mark.parametrize("path", [PROBLEMS, TRAIN])
def test_own_problems_score_correct(path):
    for problem in load_problems(path)[0]:
        assert all(r["correct"] for r in score(problem.solution, problem.answer).values())


@pytest.mark.weights
def test_public_test_file():
    folder = os.environ.get("JAXKV_GSM8K_DIR")
    if not folder:
        pytest.skip("set JAXKV_GSM8K_DIR to a folder with gsm8k_test.jsonl and gsm8k_train.jsonl")
    problems, origin = load_problems(str(Path(folder) / "gsm8k_test.jsonl"))
    assert origin["rows"] == len(problems) == 1319
    golds = [p.solution.rpartition("####")[2] for p in problems]
    assert sum("," in gold for gold in golds) == 14
    assert sum(Decimal(p.answer) < 0 for p in problems) == 2
    wrong = [
        (p.index, name) for p in problems for name, r in score(p.solution, p.answer).items() if r["correct"] is not True
    ]
    assert wrong == []
    train, _ = load_problems(str(Path(folder) / "gsm8k_train.jsonl"), "train")
    assert len(train) == 7473
    assert len(choose_shots(PromptSpec("few_shot", 8, seed=0), train, problems)) == 8
