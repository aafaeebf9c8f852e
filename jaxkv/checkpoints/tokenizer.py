"""One interface to every tokenizer: BOS exactly when it should be, stop ids from wherever they are kept."""

import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from jaxkv import files
from jaxkv.errors import UserError

RULES_FILE = "jaxkv_tokenizer.json"
# Special tokens that end a turn in the models here, also where their files do not say so.
TURN_ENDS = frozenset(
    ("</s>", "<eos>", "<end_of_turn>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
)

Id = Annotated[int, msgspec.Meta(ge=0)]


class Rules(msgspec.Struct, frozen=True):
    """What `save` writes beside a tokenizer's own files, and what a record keeps of it."""

    kind: Literal["huggingface", "bytes"]
    add_bos: bool  # whether `encode` puts BOS first
    bos_id: Id | None  # None if there is none
    eos_ids: tuple[Id, ...]  # that end a generation, sorted
    vocab_size: Id  # added tokens included
    has_chat_template: bool  # whether `chat` works


class _Shared:
    """What both kinds of tokenizer do alike; the attributes are those of `Rules`."""

    kind: Literal["huggingface", "bytes"]
    add_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    vocab_size: int
    has_chat_template: bool

    @functools.cached_property
    def turn_ends(self) -> frozenset[int]:
        """Ids at which an answer ends."""
        return frozenset(self.eos_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        raise NotImplementedError

    def decode_new(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Text that new ids [n] add to that of a prompt [P]; special tokens left out.

        New ids alone would lose a space: sentencepiece strips one from the start of a text. Where a character was cut
        in two, the prompt's text ends in replacement characters.
        """
        before, after = self.decode(prompt), self.decode([*prompt, *new])
        shared = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        return after[shared:]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the model's answer starts. Raises UserError: there is no template."""
        raise UserError("this checkpoint has no chat template; use plain prompts or an instruction-tuned checkpoint")

    def to_json(self) -> dict[str, Any]:
        """The rules that a record needs."""
        return {name: getattr(self, name) for name in Rules.__struct_fields__} | {"eos_ids": list(self.eos_ids)}

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the rules into a directory; `load_tokenizer` reads them."""
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / RULES_FILE).write_text(json.dumps(self.to_json()))


class Tokenizer(_Shared):
    """A transformers tokenizer with its BOS rule and its stop ids made explicit."""

    kind = "huggingface"

    def __init__(self, hf: Any, *, add_bos: bool | None = None, eos_ids: Iterable[int] = ()):
        """`add_bos`: None asks the tokenizer itself; `eos_ids`: stop ids beyond the tokenizer's own EOS."""
        self.hf = hf
        self.bos_id: int | None = hf.bos_token_id
        if add_bos is None:
            add_bos = self.bos_id is not None and hf("a", verbose=False)["input_ids"][:1] == [self.bos_id]
        self.add_bos = add_bos and self.bos_id is not None
        own = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(sorted({int(i) for i in (*own, *eos_ids)}))
        self.vocab_size: int = len(hf)
        self.has_chat_template = bool(hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS first if `add_bos`; a BOS spelled out in the text is not doubled."""
        ids = list(self.hf.encode(text, add_special_tokens=False))
        if self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.hf.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def turn_ends(self) -> frozenset[int]:
        """Ids at which an answer ends: `eos_ids`, special tokens known as turn ends, and the chat template's own."""
        special = {int(i): str(token) for i, token in self.hf.added_tokens_decoder.items() if token.special}
        known = {i for i, token in special.items() if token in TURN_ENDS}
        return frozenset({*self.eos_ids, *known, *self._template_ends(special)})

    def _template_ends(self, special: Mapping[int, str]) -> list[int]:
        """The special token that the chat template puts after an answer; none where it refuses to show one."""
        if not self.has_chat_template:
            return []
        answer = "jaxkv answers"
        messages = [{"role": "user", "content": "jaxkv asks"}, {"role": "assistant", "content": answer}]
        try:
            text = self.hf.apply_chat_template(messages, tokenize=False)
        except Exception:  # jinja raises whatever the template's author chose
            return []
        rest = text.rpartition(answer)[2].lstrip()
        return [i for i, token in special.items() if rest.startswith(token)]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation (`role` and `content` each) in the model's template, up to where its answer starts.

        The template alone decides about BOS, as in transformers; a doubled one is cut. Raises UserError if there is no
        template, or it refuses the messages.
        """
        if not self.has_chat_template:
            return super().chat(messages)
        try:
            ids = self.hf.apply_chat_template(
                [dict(m) for m in messages], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            told = files.explain(error)
            raise UserError(f"the chat template refuses these messages ({told}); use plain prompts") from error
        ids = [int(i) for i in ids]
        return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the tokenizer and its rules. Raises UserError if tokenizer.json cannot say what this one does."""
        write_transformers(self.hf, directory)
        super().save(directory)


class ByteTokenizer(_Shared):
    """UTF-8 bytes as ids 0-255, then pad 256, bos 257, eos 258: the tokenizer of the test presets (V = 259)."""

    kind = "bytes"
    pad_id = 256
    bos_id = 257
    eos_ids = (258,)
    vocab_size = 259
    has_chat_template = False

    def __init__(self, add_bos: bool = True):
        self.add_bos = add_bos

    def encode(self, text: str) -> list[int]:
        """Bytes of a text, with BOS first if `add_bos`."""
        return [257] * self.add_bos + list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; specials are left out, broken UTF-8 becomes the replacement character."""
        return bytes(int(i) for i in ids if int(i) < 256).decode(errors="replace")

    def to_transformers(self) -> Any:
        """The same ids from a transformers tokenizer, for other programs.

        Byte-level BPE without merges, its 256 letters numbered by their bytes. Only a special token spelled out in a
        text differs: transformers cuts it out.
        """
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        backend = Backend(models.BPE(vocab={letter: byte for byte, letter in bytes_to_unicode().items()}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
        backend.post_processor = bos_template("<|bos|>", self.bos_id if self.add_bos else None)
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


AnyTokenizer = Tokenizer | ByteTokenizer


def cut_turn(ids: Sequence[int], turn_ends: Iterable[int]) -> list[int]:
    """Ids up to the first turn end, which is left out: special tokens are gone from a text before it is searched."""
    ends = set(turn_ends)
    return [int(i) for i in ids[: next((n for n, i in enumerate(ids) if int(i) in ends), len(ids))]]


def check_ids(ids: Iterable[int], rows: int, tokens: int, what: str) -> None:
    """Refuses ids without an embedding: XLA would take the last row in their place without a word.

    Raises UserError if one is outside 0 to rows - 1; it names them as `what`, e.g. 'the prompt of problem 3', and how
    many `tokens` the tokenizer has.
    """
    if odd := sorted({int(i) for i in ids if not 0 <= i < rows}):
        named = ", ".join(map(str, odd[:4])) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
        raise UserError(
            f"{what} has token {named}, but the embedding has {rows} rows and the tokenizer {tokens} tokens; "
            "use the tokenizer that belongs to these weights"
        )


def check_special_ids(tokenizer: AnyTokenizer, rows: int, name: str) -> None:
    """`check_ids` for BOS, if it comes before prompts, and for the stop ids. What nothing uses may be beyond."""
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    check_ids(bos, rows, tokenizer.vocab_size, f"{name}: BOS")
    check_ids(tokenizer.eos_ids, rows, tokenizer.vocab_size, f"{name}: EOS")


def write_transformers(hf: Any, directory: str | pathlib.Path) -> None:
    """Writes tokenizer.json and what goes with it. Raises UserError if it cannot say what the tokenizer does."""
    try:
        hf.save_pretrained(str(directory))
    except OSError:
        raise
    except Exception as error:  # the class that the Rust library raises
        raise UserError(
            f"this tokenizer cannot be written as tokenizer.json ({files.explain(error)}); use the original file"
        ) from error


def bos_template(token: str, bos_id: int | None) -> Any:
    """The post-processor that puts BOS first, or nothing at all if `bos_id` is None."""
    from tokenizers import processors

    if bos_id is None:
        return processors.TemplateProcessing("$A", "$A $B:1", [])
    return processors.TemplateProcessing([token, "$A"], [token, "$A", "$B:1"], [(token, bos_id)])
