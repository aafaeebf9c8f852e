"""Training text of the shipped checkpoints: arith problems, written as in prompts, packed into rows of tokens.

A document is BOS, one or several problems separated by blank lines, EOS. A row holds whole documents, the last one cut,
and starts with a BOS. Everything is a function of the spec and the tokenizer, whatever the number of workers.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from jaxkv.tasks import arith
from jaxkv.tasks.gsm8k import Problem, show_solution, zero_shot

MOST_PROBLEMS = 12  # of a document, enough for a prompt of 8 worked examples
CHUNK = 5000  # problems of one piece of work
FIRST_SEED = 1000  # of the chunks' problems; lower ones are the few-shot examples' and the tokenizer's
SEEDS_A_RUN = 1_000_000


@dataclasses.dataclass(frozen=True)
class CorpusSpec:
    """What the text is."""

    problems: int  # how many are generated, rounded up to whole chunks
    single: float  # share of documents with one problem; the others have 2 to MOST_PROBLEMS
    length: int  # tokens of a row
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed text."""

    tokens: np.ndarray  # [R, length] uint16
    answers: np.ndarray  # [R, length] whether a token belongs to an answer, the blank line or EOS after it included

    def digest(self) -> str:
        """SHA-256 over both arrays."""
        content = hashlib.sha256(np.ascontiguousarray(self.tokens))
        content.update(np.ascontiguousarray(self.answers))
        return content.hexdigest()


def write_pieces(problems: Sequence[Problem]) -> list[str]:
    """A document's text cut where questions and answers meet: question, answer, question, answer, ..."""
    pieces = []
    for number, problem in enumerate(problems, start=1):
        pieces += [zero_shot(problem), f" {show_solution(problem)}" + "\n\n" * (number < len(problems))]
    return pieces


def write_document(problems: Sequence[Problem]) -> str:
    """A document's text, as a few-shot prompt that somebody has answered."""
    return "".join(write_pieces(problems))


def encode_documents(
    tokenizer: tokenizers.Tokenizer, documents: Iterable[Sequence[Problem]]
) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids of each document, and which of them belong to answers.

    Pieces are encoded one by one: as where a model goes on from a prompt, no token crosses from question into answer.
    """
    bos, eos = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")
    for problems in documents:
        ids, answers = [bos], [False]
        for number, piece in enumerate(tokenizer.encode_batch_fast(write_pieces(problems), add_special_tokens=False)):
            ids += piece.ids
            answers += [number % 2 == 1] * len(piece.ids)
        yield [*ids, eos], [*answers, True]


def pack(documents: Iterable[tuple[list[int], list[bool]]], length: int) -> Rows:
    """Packs encoded documents into rows. The document that a row ends in is cut, a row that is not full is left out."""
    tokens: list[int] = []
    answers: list[bool] = []
    for ids, marks in documents:
        room = length - len(tokens) % length
        tokens += ids[:room]
        answers += marks[:room]
    full = len(tokens) - len(tokens) % length
    return Rows(
        np.array(tokens[:full], np.uint16).reshape(-1, length), np.array(answers[:full], bool).reshape(-1, length)
    )


def group(problems: Sequence[Problem], single: float, rng: np.random.Generator) -> Iterator[Sequence[Problem]]:
    """Splits problems into documents of random size."""
    start = 0
    while start < len(problems):
        size = 1 if rng.random() < single else int(rng.integers(2, MOST_PROBLEMS + 1))
        yield problems[start : start + size]
        start += size


def chunk_seed(spec: CorpusSpec, chunk: int) -> int:
    """Seed of a chunk's problems."""
    return FIRST_SEED + spec.seed * SEEDS_A_RUN + chunk


def make_chunk(spec: CorpusSpec, tokenizer_json: str, chunk: int) -> Rows:
    """Rows of one chunk."""
    problems = arith.generate("train", min(CHUNK, spec.problems - chunk * CHUNK), seed=chunk_seed(spec, chunk))
    rng = np.random.default_rng([spec.seed, chunk])
    tokenizer = _read_tokenizer(tokenizer_json)
    return pack(encode_documents(tokenizer, group(problems, spec.single, rng)), spec.length)


def make_corpus(
    spec: CorpusSpec, tokenizer_json: str, workers: int, progress: Callable[[int, int], None] | None = None
) -> Rows:
    """Generates, encodes and packs the training text; `progress` is called after each chunk with (done, of).

    The number of workers, which are processes, has no effect on the result.
    """
    chunks = -(-spec.problems // CHUNK)
    work = functools.partial(make_chunk, spec, tokenizer_json)
    parts = []
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterable[Rows]] = map
        if workers > 1 and chunks > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
            context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
            pool = concurrent.futures.ProcessPoolExecutor(min(workers, chunks), mp_context=context)
            run = stack.enter_context(pool).map
        for done, part in enumerate(run(work, range(chunks)), start=1):
            parts.append(part)
            if progress is not None:
                progress(done, chunks)
    return Rows(np.concatenate([part.tokens for part in parts]), np.concatenate([part.answers for part in parts]))


def make_test_rows(tokenizer: tokenizers.Tokenizer, single: float, length: int) -> Rows:
    """The held-out problems as rows like those of the training text."""
    problems = arith.generate("test", arith.TEST_COUNT)
    documents = group(problems, single, np.random.default_rng(0))
    return pack(encode_documents(tokenizer, documents), length)


def draw_batch(step: int, batch: int, rows: int, seed: int) -> np.ndarray:
    """Rows of a step, [batch]: a function of the step alone. Each epoch has an order of its own."""
    places = np.arange(step * batch, (step + 1) * batch)
    return np.array([_permutation(rows, seed, int(place) // rows)[place % rows] for place in places])


@functools.lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


@functools.lru_cache(maxsize=1)
def _read_tokenizer(tokenizer_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json)
