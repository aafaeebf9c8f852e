"""The tokenizer of a directory in the Hugging Face layout.

`tokenizer.json` runs as it stands: a model's own class in transformers may rebuild its pipeline from parts. What it
does not say comes from the files beside it: special tokens, chat template, whether BOS comes first. A sentencepiece
model without tokenizer.json is read as GGUF's kind `llama`, which has the same pieces, scores and types.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxkv import files
from jaxkv.checkpoints.gguf_tokenizer import KEY, build_tokenizer
from jaxkv.checkpoints.tokenizer import RULES_FILE, AnyTokenizer, ByteTokenizer, Rules, Tokenizer, check_special_ids
from jaxkv.config import ModelConfig
from jaxkv.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SENTENCEPIECE = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")  # these put BOS first unless told not to
_SAMPLES = (
    "Of the 12 cafés,\n  which is the largest?  345.6",
    " a",
    "\n\n\tdef f(x):\n        return 中文 + '🙂'",
    " " * 70,
)
_CONVERT = "convert the checkpoint again"
_BPE = 2  # sentencepiece's ModelType


class _Added(msgspec.Struct):
    content: str
    special: bool = False


class _Named(msgspec.Struct):
    name: str
    template: str


_Templates = str | list[_Named]


class _Backend(msgspec.Struct):
    """Of tokenizer.json: what decides about BOS."""

    model: dict[str, Any]
    post_processor: dict[str, Any] | None = None


class _Config(msgspec.Struct):
    """Of tokenizer_config.json: what is used."""

    add_bos_token: bool | None = None
    added_tokens_decoder: dict[int, _Added] = {}
    bos_token: str | _Added | None = None
    chat_template: _Templates | None = None
    eos_token: str | _Added | None = None
    pad_token: str | _Added | None = None
    tokenizer_class: str | None = None
    unk_token: str | _Added | None = None


class _Template(msgspec.Struct):
    chat_template: _Templates


def read_tokenizer(directory: pathlib.Path, config: ModelConfig, eos_ids: Sequence[int]) -> AnyTokenizer:
    """The directory's tokenizer; bytes for a byte-sized vocabulary without one.

    `eos_ids` are the stop ids of config.json and generation_config.json. Raises UserError if there is no tokenizer, one
    of its files is broken, or BOS or a stop id has no embedding.
    """
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        if config.vocab_size == ByteTokenizer.vocab_size:
            return ByteTokenizer()
        raise UserError(f"{directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}); download its files too")
    beside = _read_beside(directory)
    add_bos = None  # as the tokenizer itself has it
    if (directory / "tokenizer.json").exists():
        hf, backend = _read_plain(directory)
        add_bos = _puts_bos(hf, backend, beside)
    elif (directory / "tokenizer.model").exists():
        hf = _read_sentencepiece(directory, beside)
    else:
        from transformers import AutoTokenizer

        with files.reading(directory / "vocab.json", kinds=(Exception,)):  # by the class that the files name
            hf = AutoTokenizer.from_pretrained(str(directory))
    template = directory / "chat_template.json"
    if not hf.chat_template and template.exists():
        hf.chat_template = _by_name(files.read_json(template, _Template).chat_template)
    check_template(hf, str(directory))
    tokenizer = Tokenizer(hf, add_bos=add_bos, eos_ids=eos_ids)
    check_special_ids(tokenizer, config.vocab_size, str(directory))
    return tokenizer


def load_tokenizer(directory: str | pathlib.Path) -> AnyTokenizer:
    """Reads what `save` wrote. Raises UserError if the directory holds no such tokenizer."""
    path = pathlib.Path(directory)
    rules = files.read_json(path / RULES_FILE, Rules, _CONVERT)
    if rules.kind == "bytes":
        return ByteTokenizer(add_bos=rules.add_bos)
    _read_beside(path, _CONVERT)
    tokenizer = Tokenizer(_read_plain(path, _CONVERT)[0], add_bos=rules.add_bos, eos_ids=rules.eos_ids)
    if tokenizer.to_json() != msgspec.to_builtins(rules) | {"eos_ids": list(rules.eos_ids)}:
        raise UserError(f"{path / RULES_FILE} does not fit tokenizer.json beside it; {_CONVERT}")
    return tokenizer


def _read_beside(directory: pathlib.Path, remedy: str = files.AGAIN) -> _Config:
    """tokenizer_config.json. Raises UserError if it or another file that transformers reads is broken."""
    kinds: dict[str, Any] = {"tokenizer_config.json": _Config, "chat_template.json": _Template}
    for name in ("special_tokens_map.json", "added_tokens.json", *kinds):
        if (directory / name).exists():
            files.read_json(directory / name, kinds.get(name, dict), remedy)
    if (directory / "chat_template.jinja").exists():
        files.read_text(directory / "chat_template.jinja", remedy)
    path = directory / "tokenizer_config.json"
    return files.read_json(path, _Config) if path.exists() else _Config()


def _read_plain(directory: pathlib.Path, remedy: str = files.AGAIN) -> tuple[Any, _Backend]:
    """A transformers tokenizer that runs tokenizer.json as it stands. Raises UserError if it is broken."""
    from transformers import PreTrainedTokenizerFast

    path = directory / "tokenizer.json"
    backend = files.read_json(path, _Backend, remedy)
    with files.reading(path, remedy, (Exception,)):  # the Rust library has no class of its own
        hf = PreTrainedTokenizerFast.from_pretrained(str(directory))
        first = hf("a", verbose=False, return_special_tokens_mask=True)
    if hf.bos_token is None and first["special_tokens_mask"][:1] == [1]:
        hf.bos_token = hf.convert_ids_to_tokens(first["input_ids"][0])
    return hf, backend


def _puts_bos(hf: Any, backend: _Backend, config: _Config) -> bool:
    """Whether BOS comes first: as tokenizer.json's template does, else as tokenizer_config.json says."""
    post = backend.post_processor or {}
    steps = post.get("processors", []) if post.get("type") == "Sequence" else [post]
    if any(step.get("type") == "TemplateProcessing" for step in steps):
        return bool(hf("a", verbose=False)["input_ids"][:1] == [hf.bos_token_id])
    if config.add_bos_token is not None:
        return config.add_bos_token
    if config.tokenizer_class is None:
        return bool(backend.model.get("byte_fallback", False))  # as sentencepiece's have it
    return config.tokenizer_class.removesuffix("Fast") in _SENTENCEPIECE


def _by_name(found: _Templates | None) -> str | dict[str, str] | None:
    return {one.name: one.template for one in found} if isinstance(found, list) else found


def check_template(hf: Any, name: str) -> None:
    """Raises UserError if the chat template has a syntax error. What it says to messages is not asked here."""
    from jinja2 import TemplateSyntaxError

    if not hf.chat_template:
        return
    try:
        hf.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{name}: the chat template has a syntax error in line {error.lineno} ({files.explain(error)}); "
            f"{files.AGAIN}"
        ) from error
    except Exception:  # a template may refuse messages, by whatever class its author chose
        return


def _read_sentencepiece(directory: pathlib.Path, config: _Config) -> Any:
    """tokenizer.model alone, with the special tokens and the template of tokenizer_config.json."""
    path = directory / "tokenizer.model"
    try:
        import sentencepiece
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:
        raise UserError(
            f"{path} needs sentencepiece: install it with pip install 'jaxkv[sentencepiece]', or add tokenizer.json"
        ) from None
    content = files.read_bytes(path)
    with files.reading(path, kinds=(Exception,)):  # protobuf and the library each have a class of their own
        proto = ModelProto.FromString(content)
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    hf = build_tokenizer(_model_fields(proto, config, path), str(path))
    jinja = directory / "chat_template.jinja"
    hf.chat_template = files.read_text(jinja) if jinja.exists() else _by_name(config.chat_template)
    for text in _SAMPLES:
        if hf.encode(text, add_special_tokens=False) != processor.encode(text):
            raise UserError(f"{path}: sentencepiece encodes {text!r} otherwise than we would; add a tokenizer.json")
    return hf


def _model_fields(proto: Any, config: _Config, path: pathlib.Path) -> dict[str, Any]:
    """A sentencepiece model as GGUF metadata: the format has its pieces, scores and types from there."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != _BPE:
        raise UserError(f"{path} is a sentencepiece model but no BPE, which is not implemented; add a tokenizer.json")
    tokens, types = [piece.piece for piece in proto.pieces], [piece.type for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    for i, added in sorted(config.added_tokens_decoder.items()):
        if i == len(tokens):
            tokens.append(added.content)
            types.append(3 if added.special else 4)
            scores.append(0.0)
        elif i > len(tokens) or tokens[i] != added.content:
            raise UserError(f"{path.parent}: added token {i} {added.content!r} has no place; add a tokenizer.json")

    def find(named: str | _Added | None, default: int) -> int | None:
        content = named.content if isinstance(named, _Added) else named
        found = default if content is None else tokens.index(content) if content in tokens else -1
        return found if found >= 0 else None

    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": normalizer.add_dummy_prefix,
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        "precompiled_charsmap": normalizer.precompiled_charsmap,
        "bos_token_id": find(config.bos_token, trainer.bos_id),
        "eos_token_id": find(config.eos_token, trainer.eos_id),
        "unknown_token_id": find(config.unk_token, trainer.unk_id),
        "padding_token_id": find(config.pad_token, trainer.pad_id),
        "add_bos_token": config.add_bos_token is not False,
    }
    return {KEY + key: value for key, value in fields.items()}
