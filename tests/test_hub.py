"""The hub's real clients against a stub of the hub: models and data sets, from the network and from the cache."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
from checkpoint_files import make_random, refused
from hub_stub import Hub

from jaxkv import hub as ours

SECONDS = 10  # the clients' retries alone are 23
PINNED, MOVED, OTHER = "1" * 40, "2" * 40, "3" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"pieces": []}' * 100,
    "model-00001-of-00002.safetensors": bytes(range(256)) * 2000,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 900,
    "model.safetensors.index.json": b"{}",
    "README.md": b"not for us",
    "pytorch_model.bin": b"nor this",
}
WANTED = sorted(set(FILES) - {"README.md", "pytorch_model.bin"})

FETCH = """
import json, sys, time
from jaxkv import hub
from jaxkv.errors import UserError
from jaxkv.tasks.gsm8k import load_problems

def download(hub_id, revision):
    told = []
    path, commit = hub.download(hub_id, revision, told.append)
    return {"path": str(path), "commit": commit, "told": told}

def read(split):
    problems, origin = load_problems(None, split)
    return {"rows": [[p.question, p.solution] for p in problems], "origin": origin}

for case in json.loads(sys.argv[1]):
    start = time.monotonic()
    try:
        found = read(case) if isinstance(case, str) else download(*case)
    except UserError as error:
        found = {"error": str(error)}
    print(json.dumps(found | {"seconds": time.monotonic() - start}))
"""


def fetch(environment, *cases, script=FETCH):
    """What a process of its own gets: a model by id and revision, or a split of GSM8K. It may not write errors."""
    command = [sys.executable, "-c", script, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def contents(path):
    return {file.name: file.read_bytes() for file in pathlib.Path(path).iterdir()}


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


def test_download(hub, tmp_path):
    hub.add("o/m", FILES, PINNED).commits[MOVED] = hub.add("o/m2", FILES | {"config.json": b"{}"}, MOVED).commits[MOVED]
    hub.repos["models", "o/m"].refs |= {"main": MOVED, "old": PINNED}
    environment = hub.environment(tmp_path, HF_TOKEN="hf_secret")
    pinned, main, branch = fetch(environment, ("o/m", PINNED), ("o/m", None), ("o/m", "old"))
    assert [found["commit"] for found in (pinned, main, branch)] == [PINNED, MOVED, PINNED]
    assert contents(pinned["path"]) == {name: FILES[name] for name in WANTED}
    assert contents(main["path"])["config.json"] == b"{}"
    size = sum(len(FILES[name]) for name in WANTED)
    assert pinned["told"][0] == f"downloading o/m: {size / 1000:.1f} kB in 5 files"
    assert hub.count("GET", "/cdn/") == 3  # the other commit has the same large files
    assert hub.count("GET", "README.md") == hub.count("GET", "pytorch_model.bin") == 0
    assert {headers.get("authorization") for _, _, headers in hub.log} == {None, "Bearer hf_secret"}
    assert all("authorization" not in headers for _, path, headers in hub.log if path.startswith("/cdn/"))
    before = hub.count("GET", "resolve")
    assert fetch(environment, ("o/m", PINNED))[0]["told"] == []
    assert hub.count("GET", "resolve") == before


def test_progress_of_a_slow_download(hub, tmp_path, monkeypatch):
    """Which file, and bytes of how many, at most once a second."""
    clock = iter(range(0, 100, 1))
    monkeypatch.setattr(ours.time, "monotonic", lambda: next(clock) * 0.6)
    told = []
    bars = ours._make_bars("o/m", tmp_path, {"a.safetensors": 3 * 10**9, "b.json": 4000}, told.append)
    with bars(total=0, unit="B", desc="bytes") as bar, bars(total=2, desc="files") as files:
        for _ in range(4):
            bar.update(5 * 10**8)
            files.update(1)
        (tmp_path / "a.safetensors").touch()
        for _ in range(2):
            bar.update(5 * 10**8)
    assert told[0] == "downloading o/m: 3.0 GB in 2 files"
    assert told[1] == "downloading a.safetensors and 1 more: 1.0 GB of 3.0 GB"
    assert told[-1] == "downloading b.json: 3.0 GB of 3.0 GB"
    assert len(told) == 4


def test_refusals(hub, tmp_path):
    hub.add("o/m", FILES, PINNED)
    hub.add("o/gated", FILES, PINNED, token="hf_right")
    hub.add("o/broken", FILES, PINNED, status=500)
    hub.add("o/closed", FILES, PINNED, status=503)
    hub.add("o/busy", FILES, PINNED, status=429)
    hub.add("o/private", FILES, PINNED, status=401)
    hub.add("o/forbidden", FILES, PINNED, status=403)
    hub.add("o/gguf", {"m.gguf": b"GGUF"}, PINNED)
    hub.add("o/bin", {"pytorch_model.bin": b""}, PINNED)
    expected = {
        ("o/gated", None): "o/gated is gated: accept its terms at https://huggingface.co/o/gated, then set HF_TOKEN",
        ("o/none", None): "the hub has no model 'o/none', or it is private; check the id, or set HF_TOKEN",
        ("o/m", "v9"): "o/m has no revision 'v9'; pass an existing branch, tag or commit",
        ("o/m", OTHER): f"o/m has no revision '{OTHER}'",
        ("o/broken", None): "the hub fails with status 500 while o/broken is fetched; try again later",
        ("o/closed", None): "the hub fails with status 503",
        ("o/busy", None): "the hub asks for fewer requests (429)",
        ("o/private", None): "the hub has no model 'o/private', or it is private",
        ("o/forbidden", None): "the hub denies access to o/forbidden (403)",
        ("o/gguf", None): "o/gguf holds GGUF files; download one of them",
        ("o/bin", None): "o/bin has no safetensors weights",
    }
    for case, found in zip(expected, fetch(hub.environment(tmp_path), *expected), strict=True):
        assert found["error"].startswith(expected[case]), (case, found)
        assert found["seconds"] < SECONDS, (case, found)
    with_token = hub.environment(tmp_path, HF_TOKEN="hf_wrong")
    gated, private = fetch(with_token, ("o/gated", None), ("o/private", None))
    assert gated["error"].startswith("o/gated is gated")
    assert private["error"].startswith("the hub refuses your token for o/private (401)")
    (right,) = fetch(hub.environment(tmp_path, HF_TOKEN="hf_right"), ("o/gated", None))
    assert right["commit"] == PINNED


def test_silent_hub(hub, tmp_path, monkeypatch):
    """A hub that takes the connection and says nothing costs one timeout."""
    hub.add("o/m", FILES, PINNED, wait=5.0)
    script = FETCH.replace("for case", "hub.TIMEOUT = 0.5\nfor case")
    (found,) = fetch(hub.environment(tmp_path), ("o/m", None), script=script)
    assert "cannot download o/m (ReadTimeout" in found["error"]
    assert "and no local copy is cached; give local weights with --checkpoint" in found["error"]
    assert found["seconds"] < 3


def test_cut_download(hub, tmp_path):
    """A connection that breaks is gone on with; one that breaks for good ends in a line, and the next run is right."""
    first, second = (name for name in WANTED if name.startswith("model-"))
    files = FILES | {first: bytes(range(256)) * 50_000}  # the client keeps whole pieces, of 10 MiB
    repo = hub.add("o/m", files, PINNED, cuts={first: (12 << 20, 1), second: (0, 100)})
    (found,) = fetch(hub.environment(tmp_path), ("o/m", PINNED))
    assert found["error"].startswith("cannot download o/m (RemoteProtocolError"), found
    ranges = [headers.get("range") for method, path, headers in hub.log if path.endswith(first) and method == "GET"]
    assert ranges == [None, f"bytes={10 << 20}-"]
    (found,) = fetch(hub.environment(tmp_path, HF_HUB_OFFLINE="1"), ("o/m", PINNED))
    assert "(HF_HUB_OFFLINE is set) and the local copy is incomplete" in found["error"]
    repo.cuts.clear()
    (found,) = fetch(hub.environment(tmp_path), ("o/m", PINNED))
    assert contents(found["path"]) == {name: files[name] for name in WANTED}
    assert hub.count("GET", f"cdn/models/o/m/{PINNED}/{first}") == 2  # what was whole is not asked for again


def test_damaged_cache(hub, tmp_path):
    hub.add("o/m", FILES, PINNED)
    (found,) = fetch(hub.environment(tmp_path), ("o/m", PINNED))
    directory = pathlib.Path(found["path"])
    weights, config = directory / "model-00001-of-00002.safetensors", directory / "config.json"
    right = config.read_bytes()
    weights.write_bytes(weights.read_bytes()[:1000])
    config.write_bytes(right.replace(b"llama", b"lkama"))
    (offline,) = fetch(hub.environment(tmp_path, HF_HUB_OFFLINE="1"), ("o/m", PINNED))
    assert offline["error"] == f"{config} is damaged; delete it and run again with a network"
    (again,) = fetch(hub.environment(tmp_path), ("o/m", PINNED))
    assert contents(again["path"]) == {name: FILES[name] for name in WANTED}

    digests = {weights.name: weights.resolve().name}
    ours.check_digests(directory, digests)
    with refused("is damaged: its content is not what the hub published; delete it"):
        ours.check_digests(directory, {weights.name: "0" * 64})


def test_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(ours.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    ours._check_space("o/m", 10**9)
    with refused(r"downloading o/m takes 5\.0 GB and .* has 1\.0 GB free; free some"):
        ours._check_space("o/m", 5 * 10**9)


def test_offline_afterwards(tmp_path):
    """From the cache, in seconds, whether one says that there is no network or it is just not there."""
    with Hub() as hub:
        hub.add("google/gemma-2-2b", FILES, MOVED)
        environment = hub.environment(tmp_path)
        fetch(environment, ("google/gemma-2-2b", None))
    cases = [("google/gemma-2-2b", revision) for revision in ("main", MOVED, None, PINNED)] + [("o/none", None)]
    reasons = {"0": "cannot download {} (ConnectError: ", "1": "cannot download {} (HF_HUB_OFFLINE is set) and"}
    for offline, reason in reasons.items():
        *cached, pinned, unknown = fetch(environment | {"HF_HUB_OFFLINE": offline}, *cases)
        assert [found["commit"] for found in cached] == [MOVED] * 3
        assert all(found["seconds"] < SECONDS for found in (*cached, pinned, unknown))
        assert pinned["error"].startswith(reason.format("google/gemma-2-2b"))
        assert pinned["error"].endswith(
            f"no local copy is cached of revision {PINNED}; cached is main, commit {MOVED} "
            f"(use it with --revision={MOVED})"
        )
        assert unknown["error"].startswith(reason.format("o/none"))
        assert unknown["error"].endswith("--model=test-llama2 --checkpoint=random:0 --task=arith --prompt=zero_shot")


# Data sets


def gsm8k_files(tests, trains, folder):
    """GSM8K's files as the hub has them: a card that says where the splits are, and Parquet."""
    import pyarrow
    import pyarrow.parquet

    card = ["---", "configs:", "- config_name: main", "  data_files:"]
    files = {}
    for split, rows in (("train", trains), ("test", tests)):
        table = pyarrow.Table.from_pylist([{"question": question, "answer": answer} for question, answer in rows])
        pyarrow.parquet.write_table(table, folder / split)
        files[f"main/{split}-00000-of-00001.parquet"] = (folder / split).read_bytes()
        card += [f"  - split: {split}", f"    path: main/{split}-*"]
    return {"README.md": "\n".join([*card, "---", "# GSM8K", ""]).encode(), **files}


def make_rows(split, count):
    return [
        (f"{split} {i}: what is {i} + 2?", f"{i} + 2 = <<{i}+2={i + 2}>>{i + 2}\n#### {i + 2}") for i in range(count)
    ]


TESTS, TRAINS = make_rows("Asked", 12), make_rows("Shown", 9)


def test_gsm8k(tmp_path):
    from jaxkv.tasks.gsm8k import HUB_REVISION

    with Hub() as hub:
        repo = hub.add("openai/gsm8k", gsm8k_files(TESTS, TRAINS, tmp_path), OTHER, kind="datasets")
        environment = hub.environment(tmp_path)
        (unpinned,) = fetch(environment, "test")
        assert f"no revision '{HUB_REVISION}'" in unpinned["error"]
        assert unpinned["seconds"] < SECONDS
        repo.commits[HUB_REVISION] = repo.commits[OTHER]
        online = fetch(environment, "test", "train")
    assert [found["rows"] for found in online] == [[list(row) for row in rows] for rows in (TESTS, TRAINS)]
    assert [found["origin"]["revision"] for found in online] == [HUB_REVISION] * 2
    for offline in "01":
        again = fetch(environment | {"HF_HUB_OFFLINE": offline}, "test", "train")
        assert all(found.pop("seconds") < SECONDS for found in again)
        assert again == [{key: found[key] for key in ("rows", "origin")} for found in online]
    prepared = next(tmp_path.glob(f"datasets/openai___gsm8k/main/*/{HUB_REVISION}"))
    prepared.rename(prepared.with_name(OTHER))
    (other,) = fetch(environment, "test")
    assert f"GSM8K is cached at revision {OTHER} and {HUB_REVISION} is wanted" in other["error"]
    assert other["error"].endswith("the answer ending in '#### N'")


def test_gsm8k_that_the_hub_does_not_give(hub, tmp_path):
    (unknown,) = fetch(hub.environment(tmp_path), "test")
    hub.add("openai/gsm8k", {}, OTHER, kind="datasets", status=503)
    (broken,) = fetch(hub.environment(tmp_path), "test")
    assert "the hub has no data set 'openai/gsm8k'" in unknown["error"]
    assert "the hub fails with status 503" in broken["error"]
    for found in (unknown, broken):
        assert found["error"].startswith("GSM8K could not be fetched from the Hugging Face hub: ")
        assert "; or pass --data FILE" in found["error"]
        assert found["seconds"] < SECONDS


# The whole command


def test_command(tmp_path, cache, one_layer):
    """A model and its problems from the hub; then the same command goes on without it, in the same run."""
    from jaxkv.checkpoints import export
    from jaxkv.tasks.gsm8k import HUB_REVISION

    export.export(make_random(seed=0), str(tmp_path / "model"))
    model = {path.name: path for path in (tmp_path / "model").iterdir()}
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "jaxkv.launch", "--checkpoint=owner/tiny", "--task=gsm8k", "--precision=fp16",
        "--shots=1", "--max_new_tokens=2", "--bucket=256", "--control_problems=0",
        "--gate=off", "--stepwise_problems=0", "--truth_problems=0", f"--out={out}", cache,
    ]  # fmt: skip
    with Hub() as hub:
        hub.add("owner/tiny", model, PINNED)
        data = gsm8k_files(TESTS, TRAINS, tmp_path)
        hub.add("openai/gsm8k", data, HUB_REVISION, kind="datasets")
        environment = hub.environment(tmp_path / "home")
        first = subprocess.run([*command, "--num_problems=1"], env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "downloading owner/tiny: " in first.stderr
    run = json.loads((out / "run.json").read_text())
    assert '"source": "owner/tiny"' in json.dumps(run)
    assert PINNED in json.dumps(run)
    assert HUB_REVISION in json.dumps(run)
    records = (out / "samples.jsonl").read_bytes()
    start = time.monotonic()
    again = subprocess.run([*command, "--num_problems=1"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert time.monotonic() - start < 30
    assert (out / "samples.jsonl").read_bytes() == records
