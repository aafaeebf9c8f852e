"""One interface to every tokenizer: BOS exactly when it should be, stop ids from wherever they are kept."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxkv.errors import UserError

_OURS = "jaxkv_tokenizer.json"


class Tokenizer:
    """A transformers tokenizer with its BOS rule and its stop ids made explicit.

    Attributes:
      add_bos: whether `encode` puts BOS first.
      bos_id: id of BOS, None if there is none.
      eos_ids: ids that end a generation, sorted.
      vocab_size: number of ids, added tokens included.
      has_chat_template: whether `chat` works.
    """

    def __init__(self, hf: Any, *, add_bos: bool | None = None, eos_ids: Iterable[int] = ()):
        """Wraps a transformers tokenizer.

        Args:
          hf: the tokenizer.
          add_bos: None asks the tokenizer itself.
          eos_ids: stop ids beyond the tokenizer's own EOS.
        """
        self.hf = hf
        self.bos_id: int | None = hf.bos_token_id
        if add_bos is None:
            add_bos = self.bos_id is not None and hf("a")["input_ids"][:1] == [self.bos_id]
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

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation in the model's template, up to where the model's answer starts.

        The template alone decides about BOS, as in transformers; a doubled one is cut.

        Args:
          messages: dicts with `role` and `content`.

        Raises:
          UserError: the checkpoint has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise UserError(
                "this checkpoint has no chat template; use plain prompts or an instruction-tuned checkpoint"
            )
        try:
            ids = self.hf.apply_chat_template(
                [dict(m) for m in messages], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(f"the chat template refuses these messages ({error}); change the roles") from None
        ids = [int(i) for i in ids]
        return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids

    def to_json(self) -> dict[str, Any]:
        """The rules that a record needs."""
        return {
            "kind": "huggingface",
            "add_bos": self.add_bos,
            "bos_id": self.bos_id,
            "eos_ids": list(self.eos_ids),
            "vocab_size": self.vocab_size,
            "has_chat_template": self.has_chat_template,
        }

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the tokenizer and its rules into a directory; `load_tokenizer` reads them."""
        self.hf.save_pretrained(str(directory))
        (pathlib.Path(directory) / _OURS).write_text(json.dumps(self.to_json()))


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, then pad 256, bos 257, eos 258: the tokenizer of the test presets (V = 259)."""

    pad_id = 256
    vocab_size = 259
    has_chat_template = False

    def __init__(self, add_bos: bool = True):
        self.add_bos = add_bos
        self.bos_id: int | None = 257
        self.eos_ids: tuple[int, ...] = (258,)

    def encode(self, text: str) -> list[int]:
        """Bytes of a text, with BOS first if `add_bos`."""
        return [257] * self.add_bos + list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; specials are left out, broken UTF-8 becomes the replacement character."""
        return bytes(int(i) for i in ids if int(i) < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raises UserError: bytes have no chat template."""
        raise UserError("this checkpoint has no chat template; use plain prompts or an instruction-tuned checkpoint")

    def to_transformers(self) -> Any:
        """The same ids from a transformers tokenizer, for other programs.

        Byte-level BPE without merges, its 256 letters numbered by their bytes. Only a special token spelled out in a
        text differs: transformers cuts it out.
        """
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
        backend.post_processor = bos_template("<|bos|>", self.bos_id if self.add_bos else None)
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)

    def to_json(self) -> dict[str, Any]:
        """The rules that a record needs."""
        return {
            "kind": "bytes",
            "add_bos": self.add_bos,
            "bos_id": self.bos_id,
            "eos_ids": list(self.eos_ids),
            "vocab_size": self.vocab_size,
            "has_chat_template": False,
        }

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the rules into a directory; `load_tokenizer` reads them."""
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / _OURS).write_text(json.dumps(self.to_json()))


AnyTokenizer = Tokenizer | ByteTokenizer


def bos_template(token: str, bos_id: int | None) -> Any:
    """The post-processor that puts BOS first, or nothing at all if `bos_id` is None."""
    from tokenizers import processors

    if bos_id is None:
        return processors.TemplateProcessing("$A", "$A $B:1", [])
    return processors.TemplateProcessing([token, "$A"], [token, "$A", "$B:1"], [(token, bos_id)])


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it prints, else the next one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def load_tokenizer(directory: str | pathlib.Path) -> AnyTokenizer:
    """Reads what `save` wrote. Raises UserError if the directory holds no such tokenizer."""
    path = pathlib.Path(directory)
    try:
        rules = json.loads((path / _OURS).read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} holds no tokenizer of jaxkv; convert the checkpoint again") from None
    if rules["kind"] == "bytes":
        return ByteTokenizer(add_bos=rules["add_bos"])
    from transformers import PreTrainedTokenizerFast

    # The plain class runs tokenizer.json as it stands; a model's own class may rebuild the pipeline from its parts.
    hf = PreTrainedTokenizerFast.from_pretrained(str(path))
    return Tokenizer(hf, add_bos=rules["add_bos"], eos_ids=rules["eos_ids"])
