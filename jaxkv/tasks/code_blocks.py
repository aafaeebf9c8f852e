"""Finds the Python code in a chat answer: in fences of every usual kind, or between sentences without any."""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

_OPEN = re.compile(r"^(?P<indent>[ \t]*+)(?P<before>(?:(?!```|~~~).)*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`~]*)$")
_PYTHON = re.compile(r"[{.]*(?:py|py3|python[0-9.]*)\b", re.IGNORECASE)
# What may stand outside a function that is kept from a text without fences, as EvalPlus's `sanitize` has it.
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def find_code(text: str, name: str) -> str:
    """The code of an answer that should define a function.

    It is, in this order: the first block that defines the function with a body; without one, the definitions outside
    blocks if the function is among them; the first block of Python that begins with an indented line, a body; the
    first block of Python; the text. The first definition counts, not the last: so it is with EvalPlus, with
    bigcode-evaluation-harness and with OpenAI's simple-evals, and what comes later is often a variant "for comparison".
    A head that is only quoted is no definition.
    """
    found, outside = split_blocks(text.replace("\r\n", "\n"))
    blocks = [(label, _dedent(code, name)) for label, code in found]
    for _, code in blocks:
        if implements(code, name):
            return code
    if defines(outside, name):
        return outside if _parse(outside) else _keep_definitions(outside)
    python = [code for label, code in blocks if not label or _PYTHON.match(label)]
    bodies = [code for code in python if code.lstrip("\n")[:1] in (" ", "\t")]
    return next(iter(bodies + python), outside)


def split_blocks(text: str) -> tuple[list[tuple[str, str]], str]:
    """The fenced blocks of a text, each with its label, and what stands outside them.

    A fence is three or more backticks or tildes with a label or none. A block ends at a line that begins with the same
    fence, indented by at most 3 more than the opening one (what is further in belongs to a docstring), at a line of
    code that ends with it, or at the end of the text. Backticks may open a block behind a sentence.
    """
    blocks, outside = [], []
    lines = iter(text.split("\n"))
    for line in lines:
        opening = _OPEN.match(line)
        if opening is None or (opening["before"] and opening["fence"][0] == "~"):
            outside.append(line)
        else:
            outside.append(opening["before"])
            blocks.append(_take_block(opening, lines))
    return blocks, "\n".join(outside)


def _take_block(opening: re.Match, lines: Iterator[str]) -> tuple[str, str]:
    """Label and code of the block that a line opens, without its indentation, taken off the lines that follow."""
    fence, code = opening["fence"], []
    indent = 0 if opening["before"] else len(opening["indent"])
    for line in lines:
        depth = len(line) - len(line.lstrip(" \t"))
        if line.startswith(fence, depth) and depth <= indent + 3:
            break
        line = line[min(indent, depth) :]
        last = line.rstrip().removesuffix(fence)
        if last != line.rstrip() and last.strip() and fence not in last:
            code.append(last)
            break
        code.append(line)
    return opening["info"].strip(), "\n".join(code)


def defines(code: str, name: str) -> bool:
    """Whether a line at the left margin is the head of a function of this name."""
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def implements(code: str, name: str) -> bool:
    """Whether code defines a function with more in it than a docstring, `pass` or `...`; broken code may."""
    if not defines(code, name):
        return False
    tree = _parse(code)
    if tree is None:
        return True
    heads = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    return any(not _is_empty(statement) for head in heads for statement in head.body)


def _is_empty(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass)


def _parse(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's escapes
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _dedent(code: str, name: str) -> str:
    """A block that is indented as a whole, moved to the margin."""
    dedented = textwrap.dedent(code)
    return dedented if not defines(code, name) and defines(dedented, name) else code


def _keep_definitions(text: str) -> str:
    """Imports, definitions and assignments at the left margin, from among sentences."""
    pieces: list[list[str]] = [[]]
    for line in text.split("\n"):
        follows = not line or line[0] in " \t)]}" or (pieces[-1] and pieces[-1][-1].startswith("@"))
        if follows:
            pieces[-1].append(line)
        else:
            pieces.append([line])
    trees = [(piece, _parse("\n".join(piece))) for piece in pieces]
    kept = [piece for piece, tree in trees if tree and tree.body and all(isinstance(n, _KEPT) for n in tree.body)]
    return "\n".join("\n".join(piece) for piece in kept)
