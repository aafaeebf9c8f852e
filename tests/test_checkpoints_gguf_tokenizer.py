"""Tokenizers out of GGUF fields: our ids are those of a naive reading of sentencepiece's and byte-level BPE's rules."""

import itertools
import json
import os
import pathlib
import random
import re
import unicodedata

import pytest
import regex
import transformers
from checkpoint_files import KEY, make_fields, named_file, read_fields, refused

from jaxkv.checkpoints import gguf as reader
from jaxkv.checkpoints.gguf_tokenizer import build_tokenizer
from jaxkv.checkpoints.hf_tokenizer import load_tokenizer
from jaxkv.tasks import load_task

SPACE = "\u2581"
BYTES = [f"<0x{i:02X}>" for i in range(256)]
TEXTS = [
    "", " ", "hello", " hello", "   hello  world ", "the the\tthe", "I'll we've it's", "<<48/2=24>>24 #### 72",
    "Tom has 12 apples and 3,456.70 pears; 50% of 1/2.", "a\nb\n\nc\n\n\n\nd", "\n  \n", "trailing \n",
    "x  1\n\n12\r\n 3", "def f(x):\n    if x != [1, 2]:\n\t\treturn {'a': x**2}", "naïve café e\u0301",
    "中文和日本語のテキスト", "한국어", "Ελληνικά العربية हिन्दी",
    "\U0001f642\U0001f469\u200d\U0001f467 \U0010ffff\ue000",
    "<b>bold</b> <tab <0x0A>", "\x00\x7f\ufeff\u00a0\u3000", "²½Ⅷ٣०", "=====" * 7, "-" * 33 + ">",
    " " * 40 + "x", "hahahahaha",
]  # fmt: skip


def encode_stretches(fields, encode):
    """Encodes a text: its added tokens as they stand, what is between them by `encode`."""
    tokens, types = fields[f"{KEY}tokens"], fields[f"{KEY}token_type"]
    ids = {token: i for i, token in enumerate(tokens)}
    cut, added = _cutter(tokens, types)

    def encode_text(text):
        stretches = filter(None, cut(text))
        return [i for part in stretches for i in ([ids[part]] if part in added else encode(part, ids))]

    return encode_text


def sentencepiece_ids(fields):
    """A naive sentencepiece: the adjacent pair that makes the best-scored piece is merged, leftmost among equals."""
    columns = (fields[KEY + key] for key in ("tokens", "scores", "token_type"))
    score = {token: value for token, value, kind in zip(*columns, strict=True) if kind in (1, 4)}
    prefix = SPACE if fields.get(f"{KEY}add_space_prefix", True) else ""
    worst = -1e30

    def encode(stretch, ids):
        parts = list(prefix + stretch.replace(" ", SPACE))
        pairs = [score.get(a + b, worst) for a, b in itertools.pairwise(parts)]
        while pairs and (best := max(pairs)) > worst:
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(parts[i : i + 2])]
            del pairs[i]
            for j in (i - 1, i):
                if 0 <= j < len(pairs):
                    pairs[j] = score.get(parts[j] + parts[j + 1], worst)
        spelled = [[part] if part in score else [f"<0x{b:02X}>" for b in part.encode()] for part in parts]
        return [ids[token] for token in itertools.chain(*spelled)]

    return encode_stretches(fields, encode)


WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_WORDS = (  # as in Qwen2's published tokenizer.json, which also composes letters and accents (NFC)
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split_smollm(text):
    return [found for piece in regex.split(r"(\p{N})", text) for found in regex.findall(WORDS, piece)]


def split_qwen(text):
    return regex.findall(QWEN_WORDS, unicodedata.normalize("NFC", text))


def byte_level_ids(fields, split=split_smollm):
    """A naive byte-level BPE; SmolLM2 splits the digits off first, one by one."""
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(fields[f"{KEY}merges"])}
    letters = _letters()

    def encode(stretch, ids):
        out = []
        for found in split(stretch):
            parts = [letters[b] for b in found.encode()]
            while ranks := [rank[pair] for pair in itertools.pairwise(parts) if pair in rank]:
                pairs = list(itertools.pairwise(parts))
                i = next(i for i, pair in enumerate(pairs) if rank.get(pair) == min(ranks))
                parts[i : i + 2] = ["".join(parts[i : i + 2])]
            out += [ids[part] for part in parts]
        return out

    return encode_stretches(fields, encode)


def _cutter(tokens, types):
    added = {token for token, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)}
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split, added


def _letters():
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def sentencepiece_fields(rng, prefix=False):
    """A vocabulary of random pieces: control, user-defined, byte and normal tokens."""
    chars = [SPACE, *"abehlotwrd123,.=-\n", "é", "中"]
    pieces = {SPACE + "the", "hello", SPACE + "hello", "==", "===", "====", "=====", "ha", "haha", "hah", SPACE * 2}
    for piece in list(pieces):
        pieces |= {piece[:cut] for cut in range(2, len(piece))}
    pool = chars.copy()
    while len(pieces) < 250:
        if len(piece := rng.choice(pool) + rng.choice(pool)) < 9:
            pool.append(piece)
            pieces.add(piece)
    pieces = rng.sample(sorted(pieces), len(pieces))
    special, own = ["<unk>", "<s>", "</s>"], ["\n\n", "\n\n\n", "<b>", "</b>"]
    tokens = [*special, *own, *BYTES, *pieces, *chars, "[PAD0]"]
    types = [2, 3, 3] + [4] * len(own) + [6] * 256 + [1] * (len(pieces) + len(chars)) + [5]
    scores = [-1000.0 if k != 1 else -float(i) for i, k in enumerate(types)]
    return make_fields(model="llama", tokens=tokens, scores=scores, token_type=types, add_space_prefix=prefix)


def byte_level_fields(pre="smollm"):
    letters = list(_letters().values())
    merges = ["t h", "th e", "Ġ the", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "Ċ Ġ", "ĊĠ ĠĠ", "Ã ©", "1 2", "Ġ 1"]
    tokens = ["<|endoftext|>", "<|im_start|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3] + [1] * (len(tokens) - 2)
    return make_fields(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, bos_token_id=1)


def random_texts(rng):
    parts = [*" \n1=bQé中\U0001f642", "the", " hello", "  ", "23", "==", "ha", "ab", "<b>"]
    return TEXTS + ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(300)]


def check(hf, reference, texts):
    for text in texts:
        ids = hf.encode(text, add_special_tokens=False)
        assert ids == reference(text), text
        assert hf.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_by_its_rule(seed, prefix):
    rng = random.Random(seed)
    fields = sentencepiece_fields(rng, prefix)
    hf, reference = build_tokenizer(fields, "tiny"), sentencepiece_ids(fields)
    texts = random_texts(rng)
    if prefix:  # the space before a stretch after an added token is in the decoded text as well, as in LLaMA-2
        cut, added = _cutter(fields[f"{KEY}tokens"], fields[f"{KEY}token_type"])
        after = [text for text in texts if added & set(cut(text)[:-1])]
        for text in after:
            assert hf.encode(text, add_special_tokens=False) == reference(text)
        texts = [text for text in texts if text not in after]
    check(hf, reference, texts)
    assert hf("a")["input_ids"][0] == hf.bos_token_id == 1
    assert hf.decode([1, *hf.encode("a b", add_special_tokens=False), 2], skip_special_tokens=True) == "a b"


@pytest.mark.parametrize("levels", [1, 3, 40])
def test_shared_scores(tmp_path, levels):
    """Among equal scores the leftmost pair merges first, whatever its piece: no list of merges says that."""
    rng = random.Random(levels)
    fields = sentencepiece_fields(rng, prefix=True)
    fields[f"{KEY}scores"] = [-float(rng.randrange(levels)) for _ in fields[f"{KEY}scores"]]
    tokenizer, reference = reader._read_tokenizer(fields, "tiny"), sentencepiece_ids(fields)
    for text in random_texts(rng):
        assert tokenizer.hf.encode(text, add_special_tokens=False) == reference(text), text
    offsets = tokenizer.hf(" hello 1", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert [end for _, end in offsets][-1] == len(" hello 1")
    with refused(r"cannot be written as tokenizer\.json .*; use the original file"):
        tokenizer.save(tmp_path / "saved")


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_one_character_that_share_a_score(seed):
    """As LLaMA-2's and Mistral's runs of spaces: an order of merges does it, so that the tokenizer can be saved."""
    rng = random.Random(seed)
    lengths = rng.sample(range(2, 18), rng.randint(1, 12))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "ab", SPACE + "a", *(SPACE * n for n in lengths), "a", "b", SPACE]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-1.0, -2.0] + [-1e9] * len(lengths) + [-3.0] * 3
    fields = make_fields(model="llama", tokens=tokens, token_type=types, scores=scores)
    hf, reference = build_tokenizer(fields, "tiny"), sentencepiece_ids(fields)
    assert hf.backend_tokenizer.pre_tokenizer is None
    for text in [left + " " * n + right for n in range(70) for left in ("", "a", "ab") for right in ("", "b", "a  b")]:
        assert hf.encode(text, add_special_tokens=False) == reference(text), text


def test_byte_level_by_its_rule():
    fields = byte_level_fields()
    hf, reference = build_tokenizer(fields, "tiny"), byte_level_ids(fields)
    check(hf, reference, [*TEXTS, "the  12 the\n\n12", "<|im_start|>the<|endoftext|>"])
    assert hf.convert_ids_to_tokens(hf.encode(" 12")) == ["Ġ", "1", "2"]
    gpt2 = build_tokenizer(byte_level_fields("gpt-2"), "tiny")
    assert gpt2.convert_ids_to_tokens(gpt2.encode(" 12")) == ["Ġ", "12"]
    llama3 = build_tokenizer(byte_level_fields("llama-bpe"), "tiny")
    assert llama3.convert_ids_to_tokens(llama3.encode(" 12\n\n the")) == ["<|im_start|>", "Ġ", "12", "ĊĊ", "Ġthe"]


def test_qwen2_by_its_rule():
    fields = byte_level_fields("qwen2") | {f"{KEY}add_bos_token": False}
    tokenizer, reference = reader._read_tokenizer(fields, "tiny"), byte_level_ids(fields, split_qwen)
    assert not tokenizer.add_bos
    for text in [*TEXTS, "the  12 the\n\n12", "(the)the's'S 1 12\r\n\n  the", "<|im_start|>the<|endoftext|>"]:
        assert tokenizer.encode(text) == reference(text), text
        assert tokenizer.decode(tokenizer.hf.encode(text)) == re.sub(
            r"<\|\w+\|>", "", unicodedata.normalize("NFC", text)
        )
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode(" 12\n\n the")) == ["Ġ", "1", "2", "ĊĊ", "Ġthe"]


def test_saved_and_loaded(tmp_path):
    fields = sentencepiece_fields(random.Random(0))
    fields["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = reader._read_tokenizer(fields, "tiny")
    tokenizer.save(tmp_path / "saved")
    back = load_tokenizer(tmp_path / "saved")
    assert back.to_json() == tokenizer.to_json()
    for text in TEXTS:
        assert back.encode(text) == tokenizer.encode(text)
    messages = [{"role": "user", "content": "hello\n\nthe"}]
    assert back.chat(messages) == tokenizer.chat(messages)


def fails(fields, words):
    with refused(words):
        reader._read_tokenizer(fields, "tiny")


def test_faults():
    fields = sentencepiece_fields(random.Random(0))
    tokens, types, scores = (fields[KEY + key] for key in ("tokens", "token_type", "scores"))
    fails(fields | {f"{KEY}model": "bert"}, "tokenizer 'bert' is not implemented; known: llama, gpt2")
    fails({}, "holds no tokenizer")
    fails(fields | {f"{KEY}tokens": None}, "lacks tokenizer.ggml.tokens")
    fails(fields | {f"{KEY}scores": scores[1:]}, "tokens with .* scores")
    fails(fields | {f"{KEY}token_type": types[1:]}, "with .* types")
    fails(fields | {f"{KEY}tokens": [*tokens[:-1], "hello"]}, f"{len(tokens)} tokens, {len(tokens) - 1} distinct")
    fails(fields | {f"{KEY}bos_token_id": len(tokens)}, "bos_token_id=.* is no token")
    fails(fields | {f"{KEY}remove_extra_whitespaces": True}, "remove_extra_whitespaces is not implemented")
    fails(fields | {f"{KEY}scores": [float("nan"), *scores[1:]]}, f"{len(tokens) - 1} of them finite")
    fails(fields | {f"{KEY}bos_token_id": "one"}, "bos_token_id='one' is no token")
    fails(fields | {f"{KEY}eos_token_id": [1]}, "eos_token_id: expected `int | null`")
    fails(fields | {"tokenizer.chat_template": 3}, "field tokenizer.chat_template: expected `str | null`")
    fails(fields | {"tokenizer.chat_template": "{% if %}"}, "chat template has a syntax error in line 1")
    fails(
        fields | {f"{KEY}token_type": [5 if token == "hello" else k for token, k in zip(tokens, types, strict=True)]},
        "merge into the unused token 'hello'",
    )
    byte_level = byte_level_fields()
    for pre in ("default", "tekken", None):
        fails(byte_level | {f"{KEY}pre": pre}, f"pre-tokenizer {pre!r} is not implemented; known: gpt-2, smollm, llama")
    fails(byte_level | {f"{KEY}merges": ["t h", "q q"]}, "merge 'q q' is not of two tokens into one")
    fails(byte_level | {f"{KEY}add_space_prefix": True}, "add_space_prefix is not implemented")


def test_a_tokenizer_that_loses_text_is_refused():
    fields = sentencepiece_fields(random.Random(0))
    lost = [f"[LOST{i}]" if token in BYTES else token for i, token in enumerate(fields[f"{KEY}tokens"])]
    fails(fields | {f"{KEY}tokens": lost}, "cannot be trusted, it turns .* into")


def gsm8k_texts(count=200):
    if "JAXKV_GSM8K_DIR" not in os.environ:
        return []
    lines = (pathlib.Path(os.environ["JAXKV_GSM8K_DIR"]) / "gsm8k_test.jsonl").read_text().splitlines()[:count]
    return [text for row in map(json.loads, lines) for text in (row["question"], row["answer"])]


@pytest.mark.weights
def test_gemma3():
    fields = read_fields(named_file("JAXKV_GEMMA3_GGUF"))
    tokenizer = reader._read_tokenizer(fields, "gemma")
    check(tokenizer.hf, sentencepiece_ids(fields), TEXTS + gsm8k_texts())
    if "JAXKV_GSM8K_DIR" in os.environ:
        directory = pathlib.Path(os.environ["JAXKV_GSM8K_DIR"])
        task = load_task(
            "gsm8k", data=str(directory / "gsm8k_test.jsonl"), fewshot_data=str(directory / "gsm8k_train.jsonl")
        )
        ids = tokenizer.encode(task.prompt(task.problems[0]))
        assert len(ids) == 1128
        assert ids[:3] == [2, 14977, 236787]


@pytest.mark.weights
def test_smollm2():
    fields = read_fields(named_file("JAXKV_SMOLLM2_GGUF"))
    tokenizer = reader._read_tokenizer(fields, "smollm2")
    assert not any(set(merge) & set("0123456789") for merge in fields[f"{KEY}merges"])  # its digits stand alone
    check(tokenizer.hf, byte_level_ids(fields), TEXTS + gsm8k_texts())


@pytest.mark.weights
def test_qwen():
    fields = read_fields(named_file("JAXKV_QWEN_GGUF"))
    tokenizer = reader._read_tokenizer(fields, "qwen")
    assert not tokenizer.add_bos
    reference = byte_level_ids(fields, split_qwen)
    for text in TEXTS + gsm8k_texts():
        assert tokenizer.encode(text) == reference(text)
    directory, file = os.path.split(os.environ["JAXKV_QWEN_GGUF"])
    theirs = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=file)
    for text in gsm8k_texts()[::2]:
        messages = [{"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(messages) == ids
