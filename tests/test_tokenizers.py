"""Tokenizers as published: sentencepiece's ids from every form, text in its context, turn ends, ids, broken files."""

import dataclasses
import gzip
import json
import os
import pathlib
import shutil
import sys
import types

import mistral_common
import pytest
import sentencepiece
from checkpoint_files import make_fields, named_file, read_fields, refused
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxkv.checkpoints import gguf as reader
from jaxkv.checkpoints.hf_tokenizer import load_tokenizer, read_tokenizer
from jaxkv.checkpoints.tokenizer import ByteTokenizer, Tokenizer, bos_template, cut_turn
from jaxkv.experiments.batches import Item, make_arm
from jaxkv.loading import _items
from jaxkv.models.families import get_preset
from jaxkv.rollout import make_layout
from jaxkv.tasks import load_task
from jaxkv.tasks.task import PromptSpec

VOCABULARIES = pathlib.Path(mistral_common.__file__).parent / "data"
MODELS = {  # of LLaMA-2's form and Mistral 7B v0.1 and v0.2's; v2 is Mixtral's; v0.3's
    "v1": VOCABULARIES / "tokenizer.model.v1",
    "v2": VOCABULARIES / "mistral_instruct_tokenizer_240216.model.v2",
    "v3": VOCABULARIES / "mistral_instruct_tokenizer_240323.model.v3",
}
FORMS = ("gguf", "tokenizer.json", "tokenizer.model")
LLAMA = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"  # noqa: E501
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
HI = [{"role": "user", "content": "Hi"}]


def write_json(path, value):
    path.write_text(json.dumps(value))


def write_backend(path, proto, adds_bos=True):
    """tokenizer.json as transformers converts LLaMA-2's: Prepend and Replace, merges by score, the longest first."""
    scores = {piece.piece: piece.score for piece in proto.pieces}
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    cuts = [(token[:n], token[n:]) for token in vocab for n in range(1, len(token))]
    merges = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda pair: (scores["".join(pair)], len(pair[0]), len(pair[1])), reverse=True)
    backend = Backend(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = [piece.piece for piece in proto.pieces if piece.type in (2, 3)]
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        backend.post_processor = bos_template("<s>", 1)
    backend.save(str(path))


def model_config(rows):
    return dataclasses.replace(get_preset("test-llama2"), vocab_size=rows)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(vocabulary, form) -> our tokenizer; read once."""
    made = {}

    def read(version, form):
        if (version, form) not in made:
            directory = tmp_path_factory.mktemp(f"{version}-{form}")
            proto = ModelProto.FromString(MODELS[version].read_bytes())
            if form == "gguf":
                tokens, types = [one.piece for one in proto.pieces], [one.type for one in proto.pieces]
                scores = [one.score for one in proto.pieces]
                fields = make_fields(model="llama", tokens=tokens, scores=scores, token_type=types)
                made[version, form] = reader._read_tokenizer(fields, "a.gguf")
                return made[version, form]
            write_json(directory / "tokenizer_config.json", CONFIG | {"chat_template": LLAMA})
            if form == "tokenizer.json":
                write_backend(directory / form, proto)
            else:
                shutil.copy(MODELS[version], directory / form)
            made[version, form] = read_tokenizer(directory, model_config(len(proto.pieces)), [2])
        return made[version, form]

    return read


def read_texts():
    """Ours, and where the data are at hand all of GSM8K (test), HumanEval and IFEval."""
    texts = [" " * n for n in range(70)] + [f"a{' ' * n}b{' ' * n}" for n in range(70)]
    texts += ["", "Hi", " Hi", "naïve café 中文 🙂", "1,234.50 $", "\r\n ▁ ▁▁"]
    texts += ["\n\n\tdef f(x):\n        return x  # é"]
    if "JAXKV_GSM8K_DIR" in os.environ:
        data = named_file("JAXKV_GSM8K_DIR")
        rows = [json.loads(line) for line in (data / "gsm8k_test.jsonl").read_text().splitlines()]
        texts += [text for row in rows for text in (row["question"], row["answer"])]
        texts += [json.loads(line)["prompt"] for line in (data / "ifeval.jsonl").read_text().splitlines()]
        programs = gzip.decompress((data / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
        texts += [row["prompt"] + row["canonical_solution"] for row in map(json.loads, programs)]
    return texts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", MODELS)
def test_ids_are_those_of_sentencepiece(published, version, form):
    tokenizer, theirs = published(version, form), sentencepiece.SentencePieceProcessor(model_file=str(MODELS[version]))
    assert tokenizer.add_bos
    for text in read_texts():
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode([1, *ids]) == theirs.decode(ids)


def test_chat_through_the_file_itself(published):
    """The class that transformers has for LLaMA rebuilds the pipeline; sentencepiece's ids are those of the file."""
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(MODELS["v1"]))
    for form in FORMS[1:]:
        assert published("v1", form).chat(HI) == [1, *theirs.encode("[INST] Hi [/INST]")]


@pytest.mark.parametrize("post", ["template", None])
@pytest.mark.parametrize("told", [True, False, None])
def test_bos_rule(tmp_path, post, told):
    """tokenizer.json's template decides; without one add_bos_token does, and LLaMA's class puts BOS first."""
    proto = ModelProto.FromString(MODELS["v1"].read_bytes())
    proto.ClearField("pieces")
    for i, piece in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "H", "i"]):
        proto.pieces.add(piece=piece, score=-float(i), type=2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1)
    write_backend(tmp_path / "tokenizer.json", proto, adds_bos=post is not None)
    write_json(tmp_path / "tokenizer_config.json", CONFIG | ({} if told is None else {"add_bos_token": told}))
    expected = True if post or told is None else told
    assert read_tokenizer(tmp_path, model_config(262), []).add_bos is expected
    write_json(tmp_path / "tokenizer_config.json", CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast"})
    assert read_tokenizer(tmp_path, model_config(262), []).add_bos is (post is not None)


@pytest.fixture
def directory(tmp_path):
    """A small tokenizer of bytes with special tokens, as transformers writes it."""
    hf = ByteTokenizer().to_transformers()
    hf.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    hf.save_pretrained(str(tmp_path))
    return tmp_path


TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_templates_beside_the_file(directory, file):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if file == "chat_template.jinja":
        (directory / file).write_text(TURNS)
    else:
        write_json(directory / file, (config if file == "tokenizer_config.json" else {}) | {"chat_template": TURNS})
    tokenizer = read_tokenizer(directory, model_config(261), [])
    text = "".join(chr(i) if i < 256 else f"<{i}>" for i in tokenizer.chat(HI))
    assert text == "<257><259>user\nHi<260>\n<259>model\n"


def test_tokenizer_model_without_sentencepiece(tmp_path, monkeypatch):
    shutil.copy(MODELS["v1"], tmp_path / "tokenizer.model")
    for name in [name for name in sys.modules if name.startswith("sentencepiece")]:
        monkeypatch.setitem(sys.modules, name, None)
    with refused(r"pip install 'jaxkv\[sentencepiece\]'"):
        read_tokenizer(tmp_path, model_config(32000), [])


@pytest.mark.parametrize("form", FORMS)
def test_new_tokens_are_read_in_their_context(published, form):
    tokenizer = published("v1", form)
    prompt, whole = tokenizer.encode("def f(x):\n"), tokenizer.encode("def f(x):\n    return '🙂'\n")
    assert tokenizer.decode_new(prompt, whole[len(prompt) :]) == "    return '🙂'\n"
    for cut in range(len(prompt), len(whole)):  # also within the four bytes of a character
        head = tokenizer.decode_new(prompt, whole[len(prompt) : cut])
        assert head.rstrip("\ufffd") + tokenizer.decode_new(whole[:cut], whole[cut:]) == "    return '🙂'\n"
    assert tokenizer.decode_new([1], tokenizer.encode("Hi")[1:]) == "Hi"
    assert tokenizer.decode_new(prompt, []) == ""


def test_bytes_in_their_context():
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("caf")
    assert tokenizer.decode_new([*prompt, 0xC3], [0xA9, 0x21]) == "é!"
    assert tokenizer.decode_new(prompt, list("é".encode())[:1]) == "\ufffd"


@pytest.mark.weights
@pytest.mark.parametrize("source", ["v1", "v3", "JAXKV_SMOLLM2_GGUF", "JAXKV_GEMMA3_GGUF", "JAXKV_QWEN_GGUF"])
def test_solutions_of_humaneval_pass(published, source):
    """The tail of prompt and solution, read in its context."""
    data = named_file("JAXKV_GSM8K_DIR") / "HumanEval.jsonl.gz"
    if source in MODELS:
        tokenizer = published(source, "gguf")
    else:
        tokenizer = reader._read_tokenizer(read_fields(named_file(source)), source)
    task = load_task("humaneval", data=str(data), allow_code_execution=True)
    passed = 0
    for problem in task.problems:
        asked = task.prompt(problem)
        prompt, whole = tokenizer.encode(asked), tokenizer.encode(asked + problem.solution)
        shared = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        text = tokenizer.decode_new(whole[:shared], whole[shared:])
        rest = tokenizer.decode_new(whole[:shared], prompt[shared:])  # where a token spans the border
        assert text.startswith(rest)
        passed += task.score(text.removeprefix(rest), problem.answer)["pass"]["correct"]
    assert (passed, len(task.problems)) == (164, 164)


def gsm8k(tmp_path):
    path = tmp_path / "problems.jsonl"
    write_json(path, {"question": "How many?", "answer": "#### 18"})
    return load_task("gsm8k", data=str(path), spec=PromptSpec("chat"))


@pytest.mark.parametrize("template", [None, TURNS])
def test_a_turn_end_ends_the_scored_text(directory, tmp_path, template):
    if template:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer, task = read_tokenizer(directory, model_config(261), []), gsm8k(tmp_path)
    assert tokenizer.eos_ids == (258,)
    tokens = [*b"#### 18", 260, *b"\n", 259, *b"user\nThe answer is 4."]
    arm = make_arm(Item(0, (257,), "18"), tokens, False, tokenizer.eos_ids, tokenizer, task)
    assert arm["text"] == "#### 18"
    assert arm["tokens"] == tokens
    assert arm["stop"] == "stop_string"
    assert [score["answer"] for score in arm["scores"].values()] == ["18"] * len(arm["scores"])
    assert make_arm(Item(0, (257,), "18"), [*b"18", 258], False, (258,), tokenizer, task)["stop"] == "eos"


def test_the_template_names_its_turn_end(directory):
    """A token that no list knows ends a turn if the template puts it there."""
    hf = PreTrainedTokenizerFast.from_pretrained(str(directory))
    hf.add_special_tokens({"additional_special_tokens": ["<|over|>"]})
    hf.chat_template = TURNS.replace("<end_of_turn>", "<|over|>")
    over = hf.convert_tokens_to_ids("<|over|>")
    assert over in Tokenizer(hf).turn_ends
    assert 256 not in Tokenizer(hf).turn_ends
    assert cut_turn([1, over, 2], Tokenizer(hf).turn_ends) == [1]


def test_ids_without_an_embedding(directory, tmp_path):
    (directory / "chat_template.jinja").write_text(TURNS)
    task = gsm8k(tmp_path)

    def items(rows):
        tokenizer = read_tokenizer(directory, model_config(rows), [])
        return _items(task, types.SimpleNamespace(tokenizer=tokenizer, config=model_config(rows)), [0])

    assert len(items(261)) == 1
    with refused(r"problem 0 has token 259, 260, but the embedding has 259 rows and .* 261"):
        items(259)
    (directory / "chat_template.jinja").unlink()
    assert read_tokenizer(directory, model_config(259), []).vocab_size == 261  # unused tokens may be beyond
    with refused("EOS has token 300, but the embedding has 259 rows"):
        read_tokenizer(directory, model_config(259), [300])
    with refused(r"a prompt has token 259, but .* 259 rows"):
        make_layout([[1, 259]], 1, 8, model_config(259))


NEST = "[" * 100_000
BROKEN = [
    ("tokenizer.json", "", "is not JSON"),
    ("tokenizer.json", '{"version": "1.0", "model": {"ty', "is not JSON"),
    ("tokenizer.json", "[]", "expected `object`"),
    ("tokenizer.json", NEST, "tokenizer.json"),
    ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": [3]}}', "cannot be read"),
    ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "cannot be read"),
    ("tokenizer.json", '{"model": null}', "field model"),
    ("tokenizer_config.json", '{"added_tokens_decoder": 3}', "field added_tokens_decoder"),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"1": "a"}}', "added_tokens_decoder"),
    ("tokenizer_config.json", '{"bos_token": 3}', "field bos_token"),
    ("tokenizer_config.json", '{"chat_template": {}}', "field chat_template"),
    ("tokenizer_config.json", '{"add_bos_token": "yes"}', "field add_bos_token"),
    ("tokenizer_config.json", '{"extra_special_tokens": 3}', "cannot be read"),
    ("tokenizer_config.json", NEST, "tokenizer_config.json"),
    ("special_tokens_map.json", "[]", "expected `object`"),
    ("chat_template.json", "{}", "missing required field `chat_template`"),
    ("chat_template.jinja", "{% for %}", "syntax error in line 1"),
    ("chat_template.jinja", b"\xff", "is not UTF-8"),
]


@pytest.mark.parametrize(("file", "content", "words"), BROKEN)
def test_broken_files(directory, file, content, words):
    (directory / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with refused(words):
        read_tokenizer(directory, model_config(261), [])


def test_a_broken_sentencepiece_model(tmp_path):
    for content in (b"", b"IQ== 0\n", MODELS["v1"].read_bytes()[:100_000]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with refused("tokenizer.model"):
            read_tokenizer(tmp_path, model_config(32000), [])


@pytest.mark.parametrize(
    "content", ["", "[]", '{"kind": "bytes"}', '{"kind": 3}', NEST, '{"kind": "huggingface", "add_bos": 1}']
)
def test_our_own_rules_damaged(tmp_path, content):
    ByteTokenizer().save(tmp_path)
    (tmp_path / "jaxkv_tokenizer.json").write_text(content)
    with refused(r"jaxkv_tokenizer\.json.*; convert the checkpoint again"):
        load_tokenizer(tmp_path)


def test_our_own_rules_changed(directory):
    tokenizer = read_tokenizer(directory, model_config(261), [])
    tokenizer.save(directory)
    assert load_tokenizer(directory).to_json() == tokenizer.to_json()
    rules = json.loads((directory / "jaxkv_tokenizer.json").read_text())
    write_json(directory / "jaxkv_tokenizer.json", rules | {"vocab_size": 3})
    with refused("does not fit tokenizer.json"):
        load_tokenizer(directory)
