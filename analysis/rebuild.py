"""Makes every page of this folder again from the records that are kept beside it.

python analysis/rebuild.py                  # all pages, or those named
python analysis/rebuild.py --check          # writes nothing; exit code 1 names the pages that are not what records give
python analysis/rebuild.py --keep NAME RUN...   # packs run directories into NAME/runs.tar.xz

coverage.md has no records: it is simulated, by tests/test_coverage.py, which this runs with all pages.

A kept run is its run.json, run.flags and samples.jsonl. Cut from them is where files lay on the machine that ran it,
and how long batches took; nothing else is.
"""

import argparse
import contextlib
import io
import json
import lzma
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import ablation
import law
import quote

from jaxkv import report
from jaxkv.errors import UserError
from jaxkv.overview.gather import LOCAL, PATHS, find_runs, name_runs
from jaxkv.overview.page import report_run

HERE = pathlib.Path(__file__).parent
RECORDS = ("run.json", "run.flags", "samples.jsonl")
PIECES = "tokens.json"  # kept where a run has it
KERNEL = re.compile(r"^Linux-\S+?(?=-x86_64|-aarch64)")  # the release of a machine's kernel decides no number
Write = Callable[[Sequence[pathlib.Path], pathlib.Path], None]


def _cut(value: Any) -> Any:
    """The value without directories of the machine it was made on."""
    if isinstance(value, dict):
        return {key: _cut(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part) for part in value]
    if isinstance(value, str):
        return KERNEL.sub("Linux", pathlib.PurePath(value).name if value.startswith(("/", ".")) else value)
    return value


def _cut_flags(text: str) -> str:
    lines = []
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if not line.startswith(LOCAL):
            lines.append(f"{name}={pathlib.PurePath(value).name}" if line.startswith(PATHS) else line)
    return "\n".join(lines) + "\n"


def keep(name: str, runs: Sequence[pathlib.Path]) -> pathlib.Path:
    """Packs run directories into NAME/runs.tar.xz, the same bytes for the same records."""
    directories = find_runs(runs)
    path = HERE / name / "runs.tar.xz"
    path.parent.mkdir(exist_ok=True)
    with lzma.open(path, "wb", preset=9 | lzma.PRESET_EXTREME) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for directory, short in sorted(zip(directories, name_runs(directories), strict=True), key=lambda pair: pair[1]):
            for part in (*RECORDS, *([PIECES] if (directory / PIECES).exists() else [])):
                data = (directory / part).read_bytes()
                if part == "run.json":
                    data = (json.dumps(_cut(json.loads(data)), indent=1) + "\n").encode()
                elif part == "run.flags":
                    data = _cut_flags(data.decode()).encode()
                entry = tarfile.TarInfo(f"{short.replace('/', '-')}/{part}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


def unpack(name: str, into: pathlib.Path) -> list[pathlib.Path]:
    """The run directories kept under NAME, unpacked below `into`."""
    with tarfile.open(HERE / name / "runs.tar.xz") as tar:
        for member in tar:  # extractall's filter came with Python 3.11.4
            path = into.joinpath(name, *pathlib.PurePosixPath(member.name).parts[-2:])
            path.parent.mkdir(parents=True, exist_ok=True)
            packed = tar.extractfile(member)
            assert packed is not None, member.name
            path.write_bytes(packed.read())
    return sorted((into / name).iterdir())


def write_study(runs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """The report of several runs as the command writes it, less the figures as JSON."""
    with contextlib.redirect_stdout(io.StringIO()):
        if report.main([*map(str, runs), f"--out={out}", *CLAIMS.get(out.parent.name, ())]):
            raise UserError(f"no report of {out.name}")
    (out / "summary.json").unlink()


def write_doctor(runs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """A page for each device that was examined."""
    for run in runs:
        report_run(run)
        (out / f"{run.name}.md").write_bytes((run / "report.md").read_bytes())


# The papers whose claims a page judges.
CLAIMS = {name: ["--claims=2604.15409"] for name in ("study", "qwen", "shipped")}
CLAIMS["caches"] = ["--claims=shebel-2025,2606.03458"]
# Each page: the folders whose records it is made of, and what writes it.
PAGES: dict[str, tuple[tuple[str, ...], Write]] = {
    "study": (("study",), write_study),
    "qwen": (("qwen",), write_study),
    "shipped": (("shipped",), write_study),
    "caches": (("caches",), write_study),
    "ablation": (("ablation",), ablation.write_page),
    "law": (("study", "qwen", "shipped", "caches"), law.write_page),
    "doctor": (("doctor",), write_doctor),
    "lowering": (("lowering",), write_study),
}


def build(page: str) -> dict[str, bytes]:
    """The files of a page by name."""
    sources, write = PAGES[page]
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / page / "page"
        out.mkdir(parents=True)
        write([run for source in sources for run in unpack(source, pathlib.Path(scratch) / "runs")], out)
        return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def read_kept(page: str) -> dict[str, bytes]:
    """The files of a page as they are kept, without its records."""
    return {file.name: file.read_bytes() for file in (HERE / page).iterdir() if file.name != "runs.tar.xz"}


def check(page: str) -> list[str]:
    """The files of a page that are not what its records give."""
    found, kept = build(page), read_kept(page)
    return [f"{page}/{name}" for name in sorted(found | kept) if found.get(name) != kept.get(name)]


def rewrite(page: str) -> None:
    """Writes a page in the place of what is kept of it."""
    found = build(page)
    for name in read_kept(page).keys() - found.keys():
        (HERE / page / name).unlink()
    for name, data in found.items():
        (HERE / page / name).write_bytes(data)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "page", nargs="*", help=f"of {', '.join(PAGES)}; all if none is named; with --keep run directories"
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--keep", metavar="NAME", help="pack run directories as the records of NAME")
    options = parser.parse_args(arguments)
    if options.keep:
        print(keep(options.keep, list(map(pathlib.Path, options.page))))
        return 0
    if unknown := [page for page in options.page if page not in PAGES]:
        raise UserError(f"no page is named '{unknown[0]}'; name some of {', '.join(PAGES)}, or none for all")
    if not (options.page or options.check):
        subprocess.run([sys.executable, HERE.parent / "tests" / "test_coverage.py"], check=True, capture_output=True)
    pages = options.page or PAGES
    if not options.check:
        for page in pages:
            rewrite(page)
        quote.rewrite()
        return 0
    odd = [name for page in pages for name in check(page)] + quote.check()
    for name in odd:
        print(f"{name} is not what its records give; run `python analysis/rebuild.py`", file=sys.stderr)
    return 1 if odd else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
