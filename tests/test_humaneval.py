"""HumanEval: programs run under limits, apart from everything, and only when that was allowed."""

import dataclasses
import functools
import gzip
import json
import os
import pathlib
import sys
import textwrap
import time

import pytest
from checkpoint_files import named_file
from task_files import serve, write_rows

from jaxkv.errors import UserError
from jaxkv.tasks import PromptSpec, code_blocks, humaneval, load_task
from jaxkv.tasks.sandbox import Limits, run_program
from jaxkv.tasks.sandbox_child import count_tasks

ROW = {
    "task_id": "Ours/0",
    "prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566370614) < 1e-6\n",
}
LABELS = ("", "python", "Python", "PYTHON", "python3", " python", "py", "python3.11 ", "{.python}", "python title=a.py")
SHORT = Limits(seconds=3, cpu_seconds=1, memory_bytes=512 << 20, processes=64)
GOLD = json.dumps({name: ROW[name] for name in ("prompt", "entry_point", "test")})


@pytest.fixture
def load(tmp_path):
    data = write_rows(tmp_path / "a.jsonl", [ROW])
    return functools.partial(load_task, "humaneval", data=data, allow_code_execution=True)


@pytest.fixture
def task(load):
    return load()


def test_code_is_not_run_without_leave(load, monkeypatch):
    monkeypatch.setattr(humaneval, "run_program", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UserError, match="give --allow_code_execution to let it") as caught:
        load(allow_code_execution=False)
    assert "\n" not in str(caught.value)


def test_task(task):
    (problem,) = task.problems
    assert task.prompt(problem) == ROW["prompt"]
    assert task.score(problem.solution, problem.answer) == {"pass": {"answer": "passed", "correct": True}}
    run_on = problem.solution + "\ndef other():\n    return broken(\n"
    assert task.score(run_on, problem.answer)["pass"]["correct"]
    assert task.score("    return r\n", problem.answer) == {"pass": {"answer": "AssertionError", "correct": False}}
    assert task.score("    return (\n", problem.answer)["pass"]["answer"] == "SyntaxError"
    assert task.label_change(problem.solution, "    return r\n", problem.answer) == {"pass": "answer_changed"}
    scoring = task.provenance["scoring"]
    assert scoring["isolation"] == run_program("", Limits()).isolation
    assert scoring["limits"]["cpu_seconds"] == Limits().cpu_seconds
    assert json.loads(json.dumps(task.provenance)) == task.provenance


def test_chat(load):
    task = load(spec=PromptSpec("chat"))
    (message,) = task.prompt(task.problems[0])
    assert ROW["prompt"].rstrip() in message["content"]
    assert task.score("    return math.pi * r * r\n", task.problems[0].answer)["pass"]["correct"]


KINDS = {
    **{f"```{label}": lambda code, label=label: f"```{label}\n{code}```" for label in LABELS},
    "tildes": lambda code: f"~~~python\n{code}~~~",
    "indented": lambda code: "1. So:\n" + textwrap.indent(f"```python\n{code}```", "   "),
    "CRLF": lambda code: f"Sure:\n```python\n{code}```\n".replace("\n", "\r\n"),
    "after bash": lambda code: f"```bash\npip install numpy\n```\n```\n{code}```",
    "after text": lambda code: f"```text\nIt loops.\n```\n```python\n{code}```",
    "after usage": lambda code: f"```python\nprint(1)\n```\nis printed by\n```python\n{code}```\nDone.",
    "before another": lambda code: f"```python\n{code}```\nTests:\n```python\nassert False\n```",
    "open": lambda code: f"```python\n{code}",
    "no fence": lambda code: code,
}


SOLUTION = "def area(r):\n    return math.pi * r**2\n"
OTHER = "def area(r):\n    return 0\n"
RIGHT = [
    *(f"Sure:\n{wrap(SOLUTION)}\nDone." for kind, wrap in KINDS.items() if kind.startswith("```")),
    *(wrap(SOLUTION) for kind, wrap in KINDS.items() if not kind.startswith("```")),
    f"````python\n{SOLUTION}````",
    f"Here it is: ```python\n{SOLUTION}```",
    f"Use `area`: ```python\n{SOLUTION}``` and ```pi```.",
    "1. ```python\n" + textwrap.indent(SOLUTION, "   ") + "   ```",
    f"```python\n{SOLUTION.rstrip()}```",
    f"```text\nThe area of a circle\n```\nSo:\n```\n{SOLUTION}```",
    f"```text\narea(2) = 12.57\n```\n{SOLUTION}",
    f"```python\n{SOLUTION}```\nNot so:\n```python\n{OTHER}```",  # the first counts
    f'You gave\n```python\ndef area(r):\n    """Area."""\n```\nand I\n```python\n{SOLUTION}```',
    f"You gave\n```python\ndef area(r):\n    pass\n```\nand I\n```python\n{SOLUTION}```",
    f"```python\nfrom __future__ import annotations\n{SOLUTION}```",
    '```python\ndef area(r):\n    """As\n    ```\n    area(1)\n    ```\n    """\n    return math.pi * r**2\n```',
    f"Here is the function:\n\nimport math\n{SOLUTION}\nExplanation\nIt multiplies. area(2) is 12.57.",
    "```python\n    return math.pi * r * r\n```",
    "Usage:\n```python\nprint(area(2))\n```\nThe body:\n```python\n    return math.pi * r * r\n```",
]
WRONG = [
    (f"```python\n{OTHER}```\nBetter:\n```python\n{SOLUTION}```", "AssertionError"),
    (f"```python\n{SOLUTION[:-8]}", "AssertionError"),  # cut inside `r**2`
    ("```bash\nls\n```", "TypeError"),  # nothing but the prompt's docstring is left, and that returns None
    ("```python\nprint(area(2))\n```", "TypeError"),
    ("", "TypeError"),
    ("I cannot do that.", "SyntaxError"),
]


@pytest.mark.parametrize(("answer", "ended"), [*((answer, "passed") for answer in RIGHT), *WRONG])
def test_fences(answer, ended):
    assert humaneval.grade(answer, GOLD, style="chat")["pass"]["answer"] == ended


@pytest.mark.parametrize("text", ["`" * 10000 + "x`", "```x" * 2500, "~~~ ~" * 2000, " " * 10000 + "x", "```\n" * 2500])
def test_fences_take_linear_time(text):
    begin = time.process_time()
    code_blocks.find_code(text, "area")
    assert time.process_time() - begin < 0.5


def test_a_text_is_run_once(task, monkeypatch):
    runs = []

    def count(program, limits):
        runs.append(program)
        return run_program(program, limits)

    monkeypatch.setattr(humaneval, "run_program", count)
    gold, text = task.problems[0].answer, "    return 12.566370614\n"
    assert task.score(text, gold)["pass"]["correct"]
    assert task.label_change(text, text, gold) == {"pass": "same"}
    assert len(runs) == 1


# The sandbox, with namespaces where the kernel has them and without.

namespaces = pytest.mark.parametrize("namespace", [True, False])


def ended(program, namespace, limits=SHORT):
    return run_program(program, dataclasses.replace(limits, namespace=namespace)).ended


@namespaces
@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("print('x' * 100000)", "passed"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("class passed(Exception): pass\nraise passed", "program.passed"),
        ("import os; os._exit(0)", "killed"),
        ("assert input() == 'x'", "EOFError"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20))", "OSError"),
        ("import os; assert os.listdir('.') == []; open('a', 'w').write('x')", "passed"),
        ("import sys; assert sys.flags.isolated and 'jaxkv' not in sys.modules", "passed"),
        ("import os; assert not [n for n in os.environ if 'SECRET' in n]", "passed"),
        ("import signal, os; assert os.getpid() != os.getppid()", "passed"),
    ],
)
def test_how_programs_end(program, how, namespace, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert ended(program, namespace) == how


@namespaces
def test_processor_time_is_limited(namespace):
    begin = time.monotonic()
    assert ended("while True: pass", namespace) == "timed out"
    assert time.monotonic() - begin < SHORT.seconds + 5


def make_sleeper(then, **options):
    """A program that starts another one, and what tells that one from others."""
    marker = f"sleeper{time.time_ns()}"
    child = '[sys.executable, "-c", "import time; time.sleep(60)", marker]'
    return f"import subprocess, sys, time\nmarker = {marker!r}\nsubprocess.Popen({child}, **{options})\n{then}", marker


@namespaces
def test_a_timeout_ends_the_whole_group(namespace):
    program, marker = make_sleeper("time.sleep(60)")
    assert ended(program, namespace, Limits(seconds=1.5)) == "timed out"
    assert not running(marker)


def test_nothing_outlives_a_namespace():
    if "namespaces" not in run_program("", SHORT).isolation["network"]:
        pytest.skip("this kernel grants no namespaces here")
    program, marker = make_sleeper("", start_new_session=True)
    assert ended(program, True) == "passed"
    assert not running(marker)


def running(marker, patience=3.0):
    """Whether a process with the marker among its arguments is still there after a while."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        commands = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                commands.append(path.read_bytes())
            except OSError:
                continue
        if not any(marker.encode() in command for command in commands):
            return False
        time.sleep(0.05)
    return True


@namespaces
@pytest.mark.parametrize(
    "call", ["socket.create_connection(ADDRESS, 2)", "urllib.request.urlopen('http://%s:%d' % ADDRESS, timeout=2)"]
)
def test_no_network(namespace, call):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket, urllib.request\nADDRESS = {server.getsockname()}\ntry:\n    {call}\n"
        program += "except OSError: pass\nelse: raise AssertionError('reached')\n"
        assert ended(program, namespace) == "passed"
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
        server.accept()[0].close()  # the same call, made here, gets through


@pytest.mark.skipif(os.getuid() != 0, reason="only root has a user to drop")
def test_root_becomes_nobody():
    outcome = run_program("import os\nassert os.getuid() == 65534\nopen('/jaxkv-was-here', 'w')", SHORT)
    if outcome.isolation["user"] == "root":
        pytest.skip("root cannot become nobody here")
    assert outcome.ended == "PermissionError"
    fork = "import os, time\nfor _ in range(200):\n    if os.fork() == 0: time.sleep(5); os._exit(0)\n"
    assert run_program(fork, SHORT).ended == "BlockingIOError"


def test_processes_that_run_already_are_counted_with_their_threads(tmp_path):
    for process, threads in (("12", 1), ("13", 3), ("self", 5)):
        for thread in range(threads):
            (tmp_path / process / "task" / str(thread)).mkdir(parents=True)
    (tmp_path / "14").mkdir()  # one that has just ended
    assert count_tasks(tmp_path) == 4
    assert count_tasks() >= 1


def test_faults(load, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="line 1: field test: expected `str` that is not blank"):
        load(data=write_rows(tmp_path / "b.jsonl", [{**ROW, "test": ""}]))
    with pytest.raises(UserError, match="no few_shot prompt"):
        load(spec=PromptSpec("few_shot", 2))
    with pytest.raises(UserError, match="no boxed prompt; use --prompt=zero_shot or --prompt=chat"):
        load(spec=PromptSpec("boxed"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="an empty program does not run in the child process"):
        load()


def test_hub(monkeypatch):
    asked = serve(monkeypatch, [ROW])
    task = load_task("humaneval", allow_code_execution=True)
    assert asked == [("openai/openai_humaneval", None, "test", None)]
    assert task.score(task.problems[0].solution, task.problems[0].answer)["pass"]["correct"]


def read_public():
    with gzip.open(named_file("JAXKV_HUMANEVAL")) as file:
        return [json.loads(line) for line in file]


def trim(code):
    return [line.rstrip() for line in code.rstrip().split("\n")]


@pytest.mark.weights
@pytest.mark.parametrize("kind", KINDS)
def test_public_solutions_are_found(kind):
    rows = read_public()
    for row in rows:
        code = row["prompt"] + row["canonical_solution"]
        found = code_blocks.find_code(KINDS[kind](code), row["entry_point"])
        assert trim(found) == trim(code), row["task_id"]
    assert len(rows) == 164


@pytest.mark.weights
@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("zero_shot", lambda row: row["canonical_solution"]),
        ("chat", lambda row: KINDS["CRLF"](row["prompt"] + row["canonical_solution"])),
        ("chat", lambda row: KINDS["```python"](row["canonical_solution"])),
    ],
    ids=["plain", "whole functions", "bodies"],
)
def test_public_solutions_pass(style, answer):
    rows = read_public()
    passed = [humaneval.grade(answer(row), json.dumps(row), style=style)["pass"]["correct"] for row in rows]
    assert sum(passed) == 164
