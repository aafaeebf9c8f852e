"""Malformed inputs of every kind that a user can give, made by a seeded generator.

Each is made from a valid one by a change that must be refused: one that no right number can follow. Changes that cannot
be noticed, such as a flipped bit in the weights of a safetensors file, are not among them.
"""

import gzip
import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sample_records import make_sample

FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
COUNTED_KEYS = ("embedding_length", "block_count", "attention.head_count", "feed_forward_length")
SPECS = {"cache_quant": (
    "", ":", "4", "kivi", "kivi:", "kivi:17", "kivi:k2", "kivi:k2v2,", "kivi:k2v2,grup=32", "kivi:k2v2,group=0",
    "kivi:k2v2,group=-1", "kivi:k2v2,group=32,group=32", "hf:4,recent=9", "llama:q9_9", "fp8:e9m9",
    "fp8:e4m3,scale=nan", "fp8:e4m3,scale=0", "int8:4", "int4,bound=some", "mask:", "mask:999", "none,first=1",
    "k=none;k=none", "v=int8;w=int8", "quarot:4,first=" + "9" * 30, "int8\x00", "turboquant:4,unit=",
    "kvarn:4,tile=1e3", "int8;int8",
), "cache_error": (
    "", "uniform", "uniform:", "uniform:1", "uniform:1,-1", "uniform:nan,1", "uniform:0,inf", "normal:0,-1",
    "normal:0,1,2", "normal:0,0.1;side=x", "normal:0,0.1;sid=k", "normal:0,0.1;side=k;side=v", "points:0,1;layers=3-1",
    "normal:0,0.1;layers=-1", "truncate:-1", "truncate:1e9", "round:3.5", "round:", "gauss:0,1", "normal:0,0.1;",
    "normal:0,1e999", "normal:0,0.1;layers=" + "9" * 30, "uniform:0,1;steps=",
)}  # fmt: skip
FLAGS = (
    "--precision=fp16,,fp32", "--precision=", "--precision=fp17", "--num_problems=" + "9" * 22, "--num_problems=0",
    "--num_problems=-1", "--num_problems=x", "--batch_size=" + "9" * 10, "--batch_size=0",
    "--max_new_tokens=" + "9" * 12,
    "--temperature=nan", "--temperature=-1", "--temperature=1e-40", "--top_p=2", "--top_k=-3", "--seed=" + "9" * 20,
    "--bucket=" + "9" * 15, "--tile=0", "--problems=1,,2", "--problems=1,1", "--problems=-1", "--sampler=beam",
    "--no_such_flag=1", "precision=bf16", "--model=gemma2-2b,", "--model=none", "--experiments=divergence,",
    "--regime=aligned,plain", "--cache_quant=int8", "--gate=maybe", "--task=gsm9k", "--residual=fp8", "--flagfile",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A malformed input."""

    name: str  # what was done to it
    path: str  # the file or directory that is given to the command; of a spec, its text
    make: Callable[[], None] = lambda: None  # writes it


def copy_tree(base: pathlib.Path, path: pathlib.Path) -> None:
    """A directory whose files are links to another's, so that each can be replaced by itself."""
    shutil.copytree(base, path, copy_function=os.symlink)


def replace(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file, or a link to one."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def to_folder(path: pathlib.Path) -> None:
    """Puts a folder where a file was."""
    path.unlink()
    path.mkdir()


def flip(content: bytes, start: int, length: int, rng: random.Random, lowest: int = 0) -> bytes:
    """Flips one bit of `length` bytes from `start` on; of the first byte none below `lowest`."""
    bit = rng.randrange(lowest, 8 * length)
    place = start + bit // 8
    return content[:place] + bytes([content[place] ^ 1 << bit % 8]) + content[place + 1 :]


def broken_texts(content: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """JSON that is none, or none that any reader of ours expects."""
    cut = rng.randrange(1, len(content.rstrip()) - 1)
    yield f"cut at {cut}", content[:cut]
    yield "empty", b""
    yield "a list", b"[]"
    yield "null", b"null"
    yield "nested deep", b"[" * 100_000 + b"]" * 100_000
    place = content.index(b'"') + 1
    yield "not UTF-8", content[:place] + b"\xff" + content[place:]
    yield "zeros", bytes(len(content))


class Generator:
    """Makes the cases of each kind, each in a place of its own under a folder.

    `bases` are valid inputs by kind: the directories "safetensors", "orbax" and "run", the file "gguf".
    """

    def __init__(self, folder: pathlib.Path, bases: dict[str, pathlib.Path]):
        self.folder, self.bases, self.count = folder, bases, 0

    def cases(self, kind: str) -> list[Case]:
        """Those of a kind, always the same."""
        if kind in SPECS:
            return [Case(repr(text[:40]), text) for text in SPECS[kind]]
        return list(getattr(self, f"_{kind}")(random.Random(f"0:{kind}")))

    def _place(self, suffix: str = "") -> pathlib.Path:
        self.count += 1
        return self.folder / f"case{self.count}{suffix}"

    def _change(self, kind: str, name: str, change: Callable[[pathlib.Path], Any]) -> Case:
        """A copy of a base directory that `change` is applied to."""
        path = self._place()

        def make() -> None:
            copy_tree(self.bases[kind], path)
            change(path)

        return Case(name, str(path), make)

    def _put(self, kind: str, name: str, file: str | pathlib.Path, content: bytes) -> Case:
        """A copy of a base directory with other content in one file."""
        return self._change(kind, name, lambda path: replace(path / file, content))

    def _write(self, name: str, suffix: str, content: bytes) -> Case:
        """A file of its own."""
        path = self._place(suffix)
        return Case(name, str(path), lambda: replace(path, content))

    # Checkpoints

    def _config(self, rng: random.Random) -> Iterator[Case]:
        """config.json and its neighbours."""
        base = self.bases["safetensors"]
        raw = json.loads((base / "config.json").read_text())
        for field in FIELDS:
            wrong: list[Any] = [None, [], {}, "x", -1, 0, True]
            for value in rng.sample(wrong, 4):
                content = json.dumps(raw | {field: value}).encode()
                yield self._put("safetensors", f"{field}: {value!r}", "config.json", content)
        for file in ("config.json", "generation_config.json", "tokenizer.json"):
            for name, content in broken_texts((base / file).read_bytes(), rng):
                yield self._put("safetensors", f"{file} {name}", file, content)
        for file in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
            yield self._change("safetensors", f"{file} a folder", lambda path, file=file: to_folder(path / file))

    def _safetensors(self, rng: random.Random) -> Iterator[Case]:
        """The header of a safetensors file, and where it ends."""
        content = (self.bases["safetensors"] / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        tensors = [name for name in header if name != "__metadata__"]

        def case(name: str, content: bytes) -> Case:
            return self._put("safetensors", name, "model.safetensors", content)

        def with_header(name: str, change: Callable[[dict[str, Any]], Any]) -> Case:
            changed = json.loads(json.dumps(header))
            change(changed)
            text = json.dumps(changed).encode()
            return case(name, struct.pack("<Q", len(text)) + text + data)

        for _ in range(10):
            yield case("header length", flip(content, 0, 8, rng))
        for _ in range(3):
            cut = rng.randrange(len(content))
            yield case(f"cut at {cut}", content[:cut])
        yield case("bytes after the end", content + bytes(8))
        for tensor in rng.sample(tensors, 3):
            start, stop = header[tensor]["data_offsets"]
            shape = header[tensor]["shape"]
            like = next(o for o in tensors if o != tensor and header[o]["shape"] == shape)
            for name, change in {
                "dtype": {"dtype": "F64" if header[tensor]["dtype"] != "F64" else "F16"},
                "dtype I8": {"dtype": "I8"},
                "no dtype": {"dtype": None},
                "shape": {"shape": [*shape[:-1], shape[-1] + 1]},
                "shape negative": {"shape": [-1, *shape[1:]]},
                "shape text": {"shape": "x"},
                "offsets swapped": {"data_offsets": [stop, start]},
                "offsets past the end": {"data_offsets": [start, stop + 10**15]},
                "offsets shorter": {"data_offsets": [start, stop - 4]},
                "offsets one": {"data_offsets": [start]},
                "offsets text": {"data_offsets": ["0", "4"]},
                "another's bytes": {"data_offsets": header[like]["data_offsets"]},
            }.items():
                yield with_header(f"{tensor} {name}", lambda found, t=tensor, c=change: found[t].update(c))
            yield with_header(f"{tensor} null", lambda found, t=tensor: found.update({t: None}))
            yield with_header(f"{tensor} missing", lambda found, t=tensor: found.pop(t))

    def _gguf(self, rng: random.Random) -> Iterator[Case]:
        """Lengths, types, names and places in a GGUF file."""
        import gguf

        path = self.bases["gguf"]
        content = path.read_bytes()
        reader = gguf.GGUFReader(path)
        base = reader.data.ctypes.data

        def place(part: Any) -> tuple[int, int]:
            return part.ctypes.data - base, part.nbytes

        spots = {"magic": (0, 4), "version": (4, 4), "tensor count": (8, 8), "field count": (16, 8)}
        counted = [field for key, field in reader.fields.items() if key.endswith(COUNTED_KEYS)]
        for field in [reader.fields["general.architecture"], *counted]:
            length, name, kind, *_ = map(place, field.parts)
            spots |= {f"{field.name} length": length, f"{field.name} name": name, f"{field.name} type": kind}
            spots[f"{field.name} value"] = place(field.parts[-1])
        tokens = reader.fields["tokenizer.ggml.tokens"]
        spots |= {"tokens' type": place(tokens.parts[3]), "tokens' count": place(tokens.parts[4])}
        for tensor in rng.sample(reader.tensors, 4):
            length, name, dims, shape, kind, offset = map(place, tensor.field.parts)
            spots |= {f"{tensor.name} {what}": where for what, where in (
                ("length", length), ("name", name), ("dims", dims), ("shape", shape), ("type", kind), ("offset", offset)
            )}  # fmt: skip
        for name, (start, length) in spots.items():
            # A type's lowest bit may tell a signed number from one that is not: the value stays right.
            lowest = 1 if name.endswith(" type") else 0
            yield self._write(f"{name} flipped", ".gguf", flip(content, start, length, rng, lowest))
        for _ in range(4):
            cut = rng.randrange(len(content))
            yield self._write(f"cut at {cut}", ".gguf", content[:cut])
        yield self._write("empty", ".gguf", b"")

    def _orbax(self, rng: random.Random) -> Iterator[Case]:
        """Files of an Orbax checkpoint of ours: what was written is hashed."""
        base = self.bases["orbax"]
        files = sorted(path.relative_to(base) for path in base.rglob("*") if path.is_file() and path.stat().st_size)
        for file in rng.sample(files, min(len(files), 14)):
            content = (base / file).read_bytes()
            flipped, half = flip(content, 0, len(content), rng), content[: len(content) // 2]
            yield self._put("orbax", f"{file} flipped", file, flipped)
            yield self._put("orbax", f"{file} cut", file, half)
            yield self._change("orbax", f"{file} gone", lambda path, file=file: (path / file).unlink())

    # What is asked and answered

    def _data(self, rng: random.Random) -> Iterator[Case]:
        """Rows of GSM8K in each kind of file."""
        import pyarrow
        import pyarrow.parquet

        rows = [{"question": f"What is {i} + 2?", "answer": f"#### {i + 2}"} for i in range(9)]
        lines = [json.dumps(row).encode() for row in rows]
        row = rng.randrange(9)
        for name, line in {
            "cut": lines[row][:-3],
            "a list": b"[]",
            "null": b"null",
            "no answer": b'{"question": "q"}',
            "answer a number": b'{"question": "q", "answer": 4}',
            "answer blank": b'{"question": "q", "answer": " "}',
            "answer without number": b'{"question": "q", "answer": "#### x"}',
            "nested deep": b"[" * 100_000 + b"]" * 100_000,
            "a lone surrogate": b'{"question": "\\ud800", "answer": "#### 4"}',
            "not UTF-8": b'{"question": "\xff", "answer": "#### 4"}',
            "NaN": b'{"question": NaN, "answer": "#### 4"}',
        }.items():
            content = b"\n".join([*lines[:row], line, *lines[row + 1 :]])
            yield self._write(f"row {name}", ".jsonl", content)
        whole = b"\n".join(lines)
        packed = gzip.compress(whole, mtime=0)
        yield self._write("empty", ".jsonl", b"")
        yield self._write("blank", ".jsonl", b"\n\n")
        yield self._write("another extension", ".csv", whole)
        yield self._write("gzip empty", ".jsonl.gz", b"")
        yield self._write("gzip that is none", ".jsonl.gz", whole)
        for _ in range(4):
            yield self._write("gzip flipped", ".jsonl.gz", flip(packed, 10, len(packed) - 10, rng))
            yield self._write("gzip cut", ".jsonl.gz", packed[: rng.randrange(len(packed))])
        target = self._place(".base")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target, write_page_checksum=True)
        table = target.read_bytes()
        (footer,) = struct.unpack("<I", table[-8:-4])
        first = pyarrow.parquet.read_metadata(target).row_group(0).column(0)
        for name, start, length in (
            ("magic at the end", len(table) - 4, 4),
            ("footer length", len(table) - 8, 4),
            ("page", first.data_page_offset + 40, first.total_compressed_size - 60),
        ):
            for _ in range(3):
                yield self._write(f"Parquet {name} flipped", ".parquet", flip(table, start, length, rng))
        yield self._write("Parquet cut", ".parquet", table[: rng.randrange(len(table) - footer)])
        yield self._write("Parquet that is none", ".parquet", whole)
        folder = self._place(".jsonl")
        yield Case("a folder", str(folder), folder.mkdir)
        yield Case("missing", str(self._place(".jsonl")))

    def _runs(self, rng: random.Random) -> Iterator[Case]:
        """Run directories that were touched."""
        base = self.bases["run"]
        run, samples = (json.loads((base / "run.json").read_text()), (base / "samples.jsonl").read_bytes())
        for name, content in broken_texts((base / "run.json").read_bytes(), rng):
            yield self._put("run", f"run.json {name}", "run.json", content)
        config = run["config"]
        for name, changed in {
            "sessions junk": run | {"sessions": [1, "x"]},
            "sessions null": run | {"sessions": None},
            "config null": run | {"config": None},
            "format text": run | {"format": "x"},
            "experiments null": run | {"config": config | {"experiments": None}},
            "experiments a number": run | {"config": config | {"experiments": 3}},
            "model a list": run | {"config": config | {"model": []}},
            "precision a number": run | {"config": config | {"precision": 7}},
            "fingerprint of another": run | {"fingerprint": "0" * 64},
        }.items():
            content = json.dumps(changed).encode()
            yield self._put("run", f"run.json {name}", "run.json", content)
        good = make_sample(1)
        forced = good["teacher_forced"]
        for name, record in {
            "kl negative": good | {"teacher_forced": forced | {"kl": [-0.5] * 4}},
            "kl shorter": good | {"teacher_forced": forced | {"kl": [0.5] * 3}},
            "tokens shorter": good | {"arms": good["arms"] | {"cached": good["arms"]["cached"] | {"tokens": [1]}}},
            "status unknown": good | {"status": "fine"},
            "problem negative": good | {"problem": -1},
            "a list": [],
            "a number": 7,
        }.items():
            content = samples + json.dumps(record).encode() + b"\n"
            yield self._put("run", f"record {name}", "samples.jsonl", content)
        for name, content in {
            "not JSON": samples + b"{\n",
            "twice": samples + samples,
            "not UTF-8": samples.replace(b"It is", b"It \xffs", 1),
            "nested deep": samples + b"[" * 100_000 + b"]" * 100_000 + b"\n",
            "infinite": samples.replace(b"0.5", b"1e999", 1),
        }.items():
            yield self._put("run", f"records {name}", "samples.jsonl", content)
        for file in ("run.json", "samples.jsonl", "run.flags"):
            yield self._change("run", f"{file} a folder", lambda path, file=file: to_folder(path / file))
        yield self._put("run", "run.flags binary", "run.flags", rng.randbytes(99) + b"\xff")

    # What is typed

    def _flagfiles(self, rng: random.Random) -> Iterator[Case]:
        """Flagfiles of one bad line among good ones."""
        for line in FLAGS:
            text = "\n".join(rng.sample(["--shots=0", "--padding=left", line], 3))
            yield self._write(line[:40], ".flags", text.encode())
        yield self._write("binary", ".flags", b"--precision=\xff\xfe\x00")
        yield self._write("zeros", ".flags", bytes(64))
        folder, loop = self._place(".flags"), self._place(".flags")
        yield Case("a folder", str(folder), folder.mkdir)
        yield Case("missing", str(self._place(".flags")))
        yield Case("names itself", str(loop), lambda: replace(loop, f"--flagfile={loop}\n--shots=x".encode()))
