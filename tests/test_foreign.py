"""Records made elsewhere: what is read from a file, what is refused with which words, and the run directory."""

import copy
import hashlib
import json
import subprocess
import sys

import pytest
from plain_records import read_run
from sample_records import make_sample
from sealing import reseal

from jaxkv import report
from jaxkv.errors import UserError
from jaxkv.foreign import main, read_foreign, write_foreign
from jaxkv.provenance import hash_tokens
from jaxkv.records import RunDirectory, to_record

PROMPT = [1, 450, 2, 77]


def make_line(problem=0, **changes):
    line = {
        "problem": problem,
        "prompt_ids": PROMPT,
        "framework": "vllm",
        "versions": {"vllm": "0.11.0", "torch": "2.9"},
        "precision": "fp16",
        "device": "H100",
        "gold": "18",
        "sampling": {"sampler": "greedy", "temperature": 1.0, "top_k": None, "top_p": None, "seed": 0},
        "arms": {
            "cached": {
                "tokens": [5, 6, 7, 2],
                "text": "It is #### 18",
                "stop": "eos",
                "top_logprobs": [[[5, -0.1], [9, -2.0]], [[6, -0.5], [8, -0.75]], [[7, -0.25]], [[2, -0.5]]],
            },
            "uncached": {
                "tokens": [5, 8, 7],
                "text": "It is #### 19",
                "stop": "length",
                "top_logprobs": [[[5, -0.5], [9, -2.5]], [[8, -0.5], [6, -0.625]], [[7, -0.5]]],
            },
        },
    }
    return {name: value for name, value in (line | changes).items() if value is not ...}


def changed(field, value):
    """A line with the value at a dotted field replaced, or dropped if it is `...`."""
    line = copy.deepcopy(make_line())
    *path, last = field.split(".")
    place = line
    for part in path:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return line


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "results.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_a_line_becomes_a_record(write):
    (record,) = read_foreign(write(make_line()))
    to_record(record)
    assert record["key"] == ["foreign", 0]
    assert (record["framework"], record["versions"]["vllm"], record["device"]) == ("vllm", "0.11.0", "H100")
    assert (record["prompt_tokens"], record["prompt_sha256"]) == (4, hash_tokens(PROMPT))
    assert record["attention"] is None
    cached, uncached = record["arms"]["cached"], record["arms"]["uncached"]
    assert (cached["tokens"], cached["stop"]) == ([5, 6, 7, 2], "eos")
    assert cached["scores"]["strict"] == {"answer": "18", "correct": True}
    assert uncached["scores"]["numeric"] == {"answer": "19", "correct": False}
    assert record["label_change"] == dict.fromkeys(("strict", "flexible", "numeric"), "answer_changed")
    assert record["free_running"] == {
        "diverged": True, "first_diverged": 1, "differing_after": 1, "compared_after": 2,
    }  # fmt: skip
    assert record["shared_prefix"] == {"flip": [False, True], "margin": [2.0, 0.125], "max_abs": [0.5, 0.25]}


def test_the_hash_is_that_of_our_records():
    """SHA-256 of little-endian int32."""
    assert hash_tokens([1, 258]) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").hexdigest()


def test_the_least_that_a_line_needs(write):
    line = {"problem": 7, "prompt_sha256": "0f" * 32, "framework": "llama.cpp", "versions": {"llama.cpp": "b1"}}
    (record,) = read_foreign(write(line | {"arms": {"cached": {"tokens": [3]}}}, "\n"))
    assert record["prompt_tokens"] is None
    assert list(record["arms"]) == ["cached"]
    assert record["free_running"] is record["shared_prefix"] is record["label_change"] is record["sampling"] is None
    assert record["arms"]["cached"]["scores"] is None


def test_equal_arms_do_not_diverge(write):
    line = make_line()
    line["arms"]["uncached"] = line["arms"]["cached"]
    (record,) = read_foreign(write(line))
    assert record["free_running"]["diverged"] is False
    assert record["shared_prefix"]["flip"] == [False] * 4
    assert record["shared_prefix"]["max_abs"] == [0.0] * 4
    assert record["shared_prefix"]["margin"][2] is None
    assert set(record["label_change"].values()) == {"same"}


@pytest.mark.parametrize("other", ["top_logits", None], ids=["another kind", "none of one arm"])
def test_what_cannot_be_compared_is_not(write, other):
    line = make_line()
    top = line["arms"]["uncached"].pop("top_logprobs")
    if other:
        line["arms"]["uncached"][other] = top
    (record,) = read_foreign(write(line))
    assert record["shared_prefix"] is None
    assert record["free_running"]["first_diverged"] == 1


def test_ids_that_only_one_arm_lists_are_left_out(write):
    line = make_line()
    line["arms"]["uncached"]["top_logprobs"][0] = [[9, -0.5], [4, -0.5]]
    line["arms"]["cached"]["top_logprobs"][1] = [[7, -0.5]]
    (record,) = read_foreign(write(line))
    assert record["shared_prefix"] == {"flip": [True, True], "margin": [0.0, 0.125], "max_abs": [1.5, None]}


FAULTS = [
    ("problem", "3", "expected `int`, got `str`; give the problem's index"),
    ("problem", ..., "missing; give the problem's index"),
    ("prompt_ids", ..., "prompt_sha256: missing; give the SHA-256"),
    ("prompt_ids", [], "prompt_ids: expected `array` of length >= 1; give the token ids"),
    ("prompt_ids", [1, "a"], r"prompt_ids\[1\]: expected `int`, got `str`; give the token ids"),
    ("prompt_ids", [1, -4], r"prompt_ids\[1\]: expected `int` >= 0"),
    ("prompt_ids", [2**40], r"prompt_ids\[0\]: expected `int` <= 2147483647"),
    ("gold", "many", "gold: .*many"),
    ("prompt_sha256", "ab", "prompt_sha256: expected `str` matching regex"),
    ("prompt_sha256", "ab" * 32, "is not that of prompt_ids"),
    ("framework", None, "expected `str`, got `null`; name the engine"),
    ("versions", {}, "versions: expected `object` of length >= 1; give the versions"),
    ("versions", {"vllm": 11}, "versions.vllm: expected `str`, got `int`"),
    ("precision", 16, r"precision: expected `str \| null`, got `int`; give a string"),
    ("gold", 18, r"gold: expected `str \| null`, got `int`; give a string"),
    ("sampling", {"sampler": "best"}, "sampling.sampler: invalid enum value 'best'; give sampler"),
    ("sampling.temperature", ..., "sampling.temperature: missing; give sampler"),
    ("arms", {}, "arms: empty; give cached or uncached or both"),
    ("arms.draft", {"tokens": [1]}, "arms.draft: unknown field; known: cached, uncached"),
    ("arms.cached", [1, 2], "arms.cached: expected `object"),
    ("arms.cached.tokens", ..., "arms.cached.tokens: missing; give the generated ids"),
    ("arms.cached.tokens", [5, 1.5, 7, 2], r"arms.cached.tokens\[1\]: expected `int`, got `float`; give"),
    ("arms.cached.token", [1], r"arms.cached.token: unknown field \(did you mean 'tokens'\?\)"),
    ("arms.cached.text", 4, r"arms.cached.text: expected `str \| null`, got `int`; give a string"),
    ("arms.cached.stop", "end; here", "arms.cached.stop: invalid enum value 'end; here'; give eos"),
    ("arms.cached.top_logits", [[[1, 0.5]]], "arms.cached.top_logits: beside top_logprobs; list"),
    ("arms.cached.top_logprobs", [[[5, -1]]], "arms.cached.top_logprobs: 1 entries, expected 4; list"),
    ("arms.cached.top_logprobs", [[[5, -1]], [], [], []], r"top_logprobs\[1\]: expected `array` of length >= 1; list"),
    ("arms.cached.top_logprobs", [[[5, -1], [6, -0.5]]] * 4, r"top_logprobs\[0\]: not in falling order; list"),
    ("arms.cached.top_logprobs", [[[5, -1], [5, -2]]] * 4, r"top_logprobs\[0\]: a token id twice; list"),
    ("arms.cached.top_logprobs", [[["5", -1]]] * 4, r"top_logprobs\[0\]\[0\]\[0\]: expected `int`, got `str`"),
    ("arms.cached.top_logprobs", [[[5, "inf"]]] * 4, r"top_logprobs\[0\]\[0\]\[1\]: expected `float`, got `str`"),
    ("modle", "x", "modle: unknown field"),
]


@pytest.mark.parametrize(("field", "value", "message"), FAULTS, ids=[f"{f}={v}"[:40] for f, v, _ in FAULTS])
def test_faults_name_file_line_field_and_remedy(write, field, value, message):
    path = write(make_line(5), changed(field, value))
    with pytest.raises(UserError, match=message) as error:
        read_foreign(path)
    said = str(error.value)
    assert said.startswith(f"{path}, line 2, ")
    assert "\n" not in said
    assert "; " in said.removeprefix(str(path))


OTHERS = {"framework": "llama.cpp", "precision": "bf16", "versions": {"vllm": "1"}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n", "has no lines"),
        ([make_line(), '{"problem": 1,\n'], "line 2: is not JSON .*; write one JSON object a line"),
        ([make_line(), "[1]\n"], "line 2: expected `object`, got `array`; write one"),
        ([make_line(), '{"problem": 1e999}\n'], "line 2: field .*: number out of range; .* with finite numbers alone"),
        ([make_line(), '{"problem": NaN}\n'], "line 2: is not JSON .*finite numbers"),
        ([make_line(1), make_line(2), make_line(1)], "line 3, problem: 1 was in line 1 already; write it once"),
        *(
            ([make_line(1), make_line(2, **{name: other})], f"line 2, {name}: .* beside .* in line 1; write a file for")
            for name, other in OTHERS.items()
        ),
    ],
)
def test_files_that_are_refused(write, lines, message):
    with pytest.raises(UserError, match=message):
        read_foreign(write(*lines))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_foreign(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="line 1: is not UTF-8"):
        read_foreign(tmp_path / "binary")


def test_a_run_directory_is_written_and_resumed(tmp_path, write):
    path, out = write(make_line(0), make_line(1)), tmp_path / "run"
    records = read_foreign(path)
    assert write_foreign(path, out, records) == 2
    before = (out / "samples.jsonl").read_bytes()
    assert write_foreign(path, out, records) == 0
    (out / "samples.jsonl").write_bytes(before[: before.index(b"\n") + 10])  # a kill tore the second line
    reseal(out, 0)
    assert write_foreign(path, out, records) == 1
    assert (out / "samples.jsonl").read_bytes() == before
    run, found = read_run(out)
    assert found == json.loads(json.dumps(records))
    assert run["config"]["framework"] == "vllm"
    other = write(make_line(0), make_line(2))
    with pytest.raises(UserError, match="another configuration"):
        write_foreign(other, out, records)


def test_no_report_is_made_of_it_alone(tmp_path, write, capsys):
    """It would say that no problem has a sample yet, and that the gate was off."""
    path, out = write(make_line(0)), tmp_path / "run"
    write_foreign(path, out, read_foreign(path))
    for arguments in ([str(out)], [str(out), f"--out={tmp_path / 'study'}"]):
        assert report.main(arguments) == 2
        assert "has results made elsewhere alone" in capsys.readouterr().err
    assert not (out / "report.md").exists()


def test_prompts_are_held_against_a_run_of_ours(tmp_path, write, capsys):
    with RunDirectory.open(tmp_path / "ours", {"a": 1}) as run:
        for problem in (0, 1):
            run.append(make_sample(problem) | {"prompt_sha256": hash_tokens(PROMPT)})
    against = f"--against={tmp_path / 'ours'}"
    assert main([str(write(make_line(1), make_line(9))), against]) == 0
    assert "the prompts of 1 problems" in capsys.readouterr().out
    assert main([str(write(make_line(1, prompt_ids=PROMPT[1:]))), against]) == 2
    assert "1 of 1 problems (the first is 1); feed the same token ids, BOS included" in capsys.readouterr().err
    assert main([str(write(make_line(8))), against]) == 2
    assert "none of these problems" in capsys.readouterr().err


def test_the_command_needs_no_jax(tmp_path, write):
    path = write(make_line())
    script = (
        "import sys; sys.modules |= dict.fromkeys(('jax', 'flax', 'torch', 'transformers'));"
        "from jaxkv.foreign import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run([*command, str(path), str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 problems by vllm, cached and uncached" in done.stdout
    assert "1 records added" in done.stdout
    path.write_text("{}\n")
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = f"error: {path}, line 1, problem: missing; give the problem's index in the data, a whole number\n"
    assert done.stderr == told
