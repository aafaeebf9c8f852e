"""The tokenizer of a GGUF file, built from its fields alone: the ids depend on no version of transformers.

Two kinds exist among the models here. `llama` is sentencepiece's BPE: a vocabulary with scores, where the adjacent pair
with the best-scored concatenation is merged first, leftmost among equals. `gpt2` is byte-level BPE with listed merges.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.checkpoints.tokenizer import bos_template
from jaxkv.errors import UserError

KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's token types
_SPACE = "\u2581"
_BYTES = tuple(f"<0x{i:02X}>" for i in range(256))
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's, for the kind `llama`
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")  # the same, but every digit stands alone


def build_tokenizer(fields: Mapping[str, Any], name: str) -> Any:
    """A transformers tokenizer from the metadata of the file `name`, keys as they stand there.

    Raises UserError on a kind of tokenizer or a pre-tokenizer not known here, or fields that do not fit together.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    kind, kinds = fields.get(f"{KEY}model"), {"llama": _sentencepiece, "gpt2": _byte_level}
    if kind is None:
        raise UserError(f"{name}: the file holds no tokenizer; use a GGUF file with its tokenizer")
    if kind not in kinds:
        raise UserError(f"{name}: GGUF tokenizer '{kind}' is not implemented; known: {', '.join(kinds)}")
    for option in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if fields.get(KEY + option):
            raise UserError(f"{name}: GGUF option {KEY}{option} is not implemented; use a model without it")
    tokens, types = _column(fields, "tokens", str, name), _column(fields, "token_type", int, name)
    vocab = {token: i for i, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(types):
        raise UserError(
            f"{name}: {len(tokens)} tokens, {len(vocab)} distinct, with {len(types)} types; use an intact GGUF file"
        )
    special = {role: _special_id(fields, role, kind, len(tokens), name) for role in _ROLES}
    named = {_ROLES[role]: tokens[i] for role, i in special.items() if i is not None}
    backend, splitter = kinds[kind](fields, vocab, types, named.get("unk_token"), name)
    backend.add_tokens([  # which are cut out of a text before anything else, the longest first
        AddedToken(token, special=one != _USER, normalized=False)
        for token, one in zip(tokens, types, strict=True)
        if one in (_UNKNOWN, _CONTROL, _USER)
    ])  # fmt: skip
    puts_bos = kind == "llama" or fields.get(f"{KEY}pre") == "llama-bpe"
    bos = special["bos"] if fields.get(f"{KEY}add_bos_token", puts_bos) else None
    backend.post_processor = bos_template("" if bos is None else tokens[bos], bos)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    if splitter is not None:  # only now: the class copies its backend, and Python code in it cannot be copied
        hf.backend_tokenizer.pre_tokenizer = splitter
    return hf


def _sentencepiece(
    fields: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int], unknown: str | None, name: str
) -> tuple[Any, Any]:
    """The kind `llama`: BPE by score with byte fallback. With it a pre-tokenizer to set at the end, or None."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = _column(fields, "scores", float, name)
    finite = sum(map(math.isfinite, scores))
    if not len(scores) == len(types) == finite:
        raise UserError(
            f"{name}: {len(types)} tokens with {len(scores)} scores, {finite} of them finite; use an intact GGUF file"
        )
    merges = _merges(vocab, scores, types, name)
    model = models.BPE(
        vocab=vocab,
        merges=merges or [],
        ignore_merges=merges is None,  # what the splitter gives are pieces already
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=all(byte in vocab for byte in _BYTES),
    )
    # llama.cpp and LLaMA-2's tokenizer.json alike put the space before every stretch of text between added tokens.
    prefix = bool(fields.get(f"{KEY}add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    if merges is not None:
        return backend, None
    pieces = {token: scores[i] for token, i in vocab.items() if types[i] == _NORMAL}
    return backend, pre_tokenizers.PreTokenizer.custom(_Greedy(pieces))


def _merges(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int], name: str
) -> list[tuple[str, str]] | None:
    """Every split of a piece into two pieces, best piece first; None where no order of merges does what scores do.

    Pairs of one rank are merged leftmost first by both. For sentencepiece the splits of one piece share a rank too,
    which a list of merges cannot say. Only in runs like `=====` do two splits want the same symbol; those are merged
    from the left, which leaves the longer part on the left, hence the order here.
    """
    ids = {token: i for token, i in vocab.items() if types[i] == _NORMAL}
    unused = {token for token, i in vocab.items() if types[i] == _UNUSED and len(token) > 1}
    for token in unused:
        if any(token[:cut] in ids and token[cut:] in ids for cut in range(1, len(token))):
            raise UserError(f"{name}: a text can merge into the unused token {token!r}, which is not implemented")
    splits = {
        token: [cut for cut in range(len(token) - 1, 0, -1) if token[:cut] in ids and token[cut:] in ids]
        for token in ids
    }
    results = sorted((token for token in ids if splits[token]), key=lambda token: (-scores[ids[token]], ids[token]))
    merges: list[tuple[str, str]] = []
    for _, tied in itertools.groupby(results, key=lambda token: scores[ids[token]]):
        group = list(tied)
        if len(group) > 1:
            if not _is_closed_run(group, merges, results):
                return None
            group.sort(key=len, reverse=True)
        merges += [(token[:cut], token[cut:]) for token in group for cut in splits[token]]
    return merges


def _is_closed_run(group: Sequence[str], better: Sequence[tuple[str, str]], results: Sequence[str]) -> bool:
    """Whether pieces of one score merge as sentencepiece has it, leftmost pair first, if the longest are listed first.

    They do if they are all the runs of one character (in LLaMA-2 and Mistral: of spaces) and no better piece is made of
    them. A stretch of that character is then alone with them. Leftmost first, one block grows from the left; all to its
    right are single characters, and no two blocks to its left merge. Its pair with the block on the left, at least 2
    long, is longer than that with the character on the right, which is longer than two characters: so the order by
    length takes the leftmost of the pairs that there are.
    """
    letter = group[0][0]
    runs = {token for token in results if not token.strip(letter)}
    return set(group) == runs and not any(part in runs for pair in better for part in pair)


@dataclasses.dataclass(frozen=True)
class _Greedy:
    """Sentencepiece's BPE: the adjacent pair that makes the best-scored piece merges first, leftmost among equals.

    A pre-tokenizer of the Rust library, in Python: for vocabularies whose pieces share scores in a way that no list of
    merges can say.
    """

    scores: Mapping[str, float]  # of every piece that a merge may make

    def pre_tokenize(self, text: Any) -> None:
        """Splits a PreTokenizedString into pieces and characters that are none."""
        text.split(lambda _, stretch: [stretch[start:end] for start, end in self.cut(str(stretch))])

    def cut(self, text: str) -> list[tuple[int, int]]:
        """Where each piece starts and ends."""
        ends = list(range(1, len(text) + 1))  # of the piece that starts there; 0 once it has merged into another
        starts = list(range(-1, len(text)))  # of the piece before the one that starts there
        heap: list[tuple[float, int, int, int]] = []

        def offer(left: int) -> None:
            middle = ends[left] if left >= 0 else len(text)
            if middle < len(text) and (score := self.scores.get(text[left : ends[middle]])) is not None:
                heapq.heappush(heap, (-score, left, middle, ends[middle]))

        for left in range(len(text)):
            offer(left)
        while heap:
            _, left, middle, end = heapq.heappop(heap)
            if ends[left] == middle and ends[middle] == end:  # else one of the two has merged since
                ends[left], ends[middle] = end, 0
                starts[end] = left
                offer(starts[left])
                offer(left)
        return [(start, end) for start, end in enumerate(ends) if end]


# How byte-level BPE splits a text before it merges: by a pattern of its own, or as GPT-2 does, with single digits or
# not. `default` is what a converter wrote that did not know the model: it does not say how text was split.
_PRE = {"gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}


def _byte_level(
    fields: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int], unknown: str | None, name: str
) -> tuple[Any, None]:
    """The kind `gpt2`: byte-level BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get(f"{KEY}pre")
    if pre not in _PRE:
        raise UserError(f"{name}: GGUF pre-tokenizer {pre!r} is not implemented; known: {', '.join(_PRE)}")
    if fields.get(f"{KEY}add_space_prefix"):
        raise UserError(f"{name}: GGUF option {KEY}add_space_prefix is not implemented for byte-level BPE")
    merges = [tuple(merge.split(" ")) for merge in _column(fields, "merges", str, name)]
    if odd := [m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()]:
        raise UserError(f"{name}: merge {' '.join(odd[0])!r} is not of two tokens into one; use an intact GGUF file")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":  # as in the tokenizer.json of every Qwen2 and Qwen3
        backend.normalizer = normalizers.NFC()
    pattern = _PRE[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    elif pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, None


def _special_id(fields: Mapping[str, Any], role: str, kind: str, count: int, name: str) -> int | None:
    found = fields.get(f"{KEY}{role}_token_id", _DEFAULT_IDS.get(role) if kind == "llama" else None)
    if found is not None and (not isinstance(found, int) or not 0 <= found < count):
        raise UserError(f"{name}: {KEY}{role}_token_id={found!r} is no token of {count}; use an intact GGUF file")
    return None if found is None else int(found)


def _column(fields: Mapping[str, Any], key: str, kind: type, name: str) -> list[Any]:
    column = fields.get(KEY + key)
    if not isinstance(column, list) or not all(isinstance(entry, kind) for entry in column):
        raise UserError(f"{name}: the GGUF metadata lacks {KEY}{key}; use a GGUF file with its tokenizer")
    return column
