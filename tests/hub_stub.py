"""A stub of the Hugging Face hub's HTTP interface on 127.0.0.1, for the real clients.

Answers as the hub does to what `huggingface_hub` and `datasets` ask: repository info, the tree, paths-info and files,
with small files served by the hub itself and large ones by a redirect to another host, with ETags, Range and HEAD.
Faults can be planted by repository or by file.
"""

import dataclasses
import hashlib
import http.server
import json
import os
import pathlib
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

LARGE = (".safetensors", ".parquet", "tokenizer.json")  # kept by SHA-256 and served by the other host
_ROUTE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/?]+))?(/.*)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Blob:
    """A file as the hub keeps it: `etag` is git's hash of a small file, SHA-256 of a large one."""

    def __init__(self, name: str, content: bytes | pathlib.Path):
        self.content = content
        self.large = name.endswith(LARGE)
        self.size = len(content) if isinstance(content, bytes) else content.stat().st_size
        digest = hashlib.sha256() if self.large else hashlib.sha1(b"blob %d\x00" % self.size)
        for piece in self.read(0):
            digest.update(piece)
        self.etag = digest.hexdigest()

    def read(self, start: int):
        """Pieces of the content from a byte on."""
        if isinstance(self.content, bytes):
            yield self.content[start:]
            return
        with self.content.open("rb") as file:
            file.seek(start)
            while piece := file.read(1 << 20):
                yield piece

    def describe(self, name: str) -> dict[str, Any]:
        """Its line of a tree."""
        found = {"type": "file", "path": name, "size": self.size, "oid": self.etag[:40]}
        return found | ({"lfs": {"oid": self.etag, "size": self.size, "pointerSize": 134}} if self.large else {})


@dataclasses.dataclass
class Repo:
    """A repository and the faults planted in it."""

    commits: dict[str, dict[str, Blob]]  # files by name, by commit
    refs: dict[str, str]  # commits by branch or tag
    status: int | None = None  # answers everything with this status
    token: str | None = None  # must come along, else the repository is gated: its files, for the hub lists them to all
    wait: float = 0.0  # seconds before every answer
    # Bytes after which the connection is closed, by file, and how many times.
    cuts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit."""
        return revision if revision in self.commits else self.refs.get(revision)


class Hub(http.server.ThreadingHTTPServer):
    """The server. As a context manager it runs in a thread of its own."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[tuple[str, str], Repo] = {}  # by kind and id, e.g. ("models", "owner/name")
        self.log: list[tuple[str, str, dict[str, str]]] = []  # every request: method, path and headers

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Says nothing of a client that went away."""

    def add(self, name: str, files: Mapping[str, bytes | pathlib.Path], commit: str, kind="models", **faults) -> Repo:
        """Adds a repository whose main branch is at a commit."""
        blobs = {path: Blob(path, content) for path, content in files.items()}
        self.repos[kind, name] = Repo({commit: blobs}, {"main": commit}, **faults)
        return self.repos[kind, name]

    def environment(self, home: pathlib.Path, **more: str) -> dict[str, str]:
        """Variables for a process whose hub this is, and which keeps its files in `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        endpoint = f"http://127.0.0.1:{self.server_port}"
        return kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | more

    def count(self, method: str = "GET", words: str = "") -> int:
        """Requests of a method whose path has these words."""
        return sum(done == method and words in path for done, path, _ in self.log)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.log.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        path = urllib.parse.urlsplit(self.path).path
        if match := _ROUTE.fullmatch(path):
            kind, name, route, revision, _ = match.groups()
            self._tell(kind, name, route, urllib.parse.unquote(revision or "main"), body)
        elif match := _FILE.fullmatch(path):
            kind = "datasets" if match[1] else "models"
            self._send_file(kind, match[2], urllib.parse.unquote(match[3]), urllib.parse.unquote(match[4]))
        elif path.startswith("/cdn/"):
            _, _, kind, owner, repo, commit, name = path.split("/", 6)
            found = self.server.repos[kind, f"{owner}/{repo}"]
            name = urllib.parse.unquote(name)
            self._send_blob(found, name, found.commits[commit][name], {})
        else:
            self._fail(404)

    do_HEAD = do_POST = do_GET

    def _send(self, status: int, headers: Mapping[str, str], content: bytes = b"", size: int | None = None):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content) if size is None else size)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str = "", message: str = ""):
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        content = json.dumps({"error": message}).encode()
        self._send(status, {key: value for key, value in headers.items() if value}, content)

    def _find(self, kind: str, name: str, revision: str, file: bool = False) -> tuple[Repo, str] | None:
        """The repository and the commit; None if a fault was answered."""
        repo = self.server.repos.get((kind, name))
        if repo is None:
            return self._fail(404, "RepoNotFound", "Repository not found")
        time.sleep(repo.wait)
        status = repo.status
        if repo.token and file and self.headers.get("Authorization") != f"Bearer {repo.token}":
            status = 403 if "Authorization" in self.headers else 401
        if status in (401, 403):
            return self._fail(status, "GatedRepo" if repo.token else "", "Access is restricted")
        if status:
            return self._fail(status)
        if (commit := repo.resolve(revision)) is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _tell(self, kind: str, name: str, route: str | None, revision: str, body: bytes):
        found = self._find(kind, name, revision)
        if found is None:
            return
        repo, commit = found
        files = repo.commits[commit]
        answer: Any
        if route == "tree":
            answer = [blob.describe(path) for path, blob in files.items()]
            folders = {path.rpartition("/")[0] for path in files if "/" in path}
            answer += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        elif route == "paths-info":
            text = body.decode()
            asked = json.loads(text)["paths"] if text.startswith("{") else urllib.parse.parse_qs(text)["paths"]
            answer = [files[path].describe(path) for path in asked if path in files]
        else:
            siblings = [{"rfilename": path, "size": blob.size, "blobId": blob.etag} for path, blob in files.items()]
            answer = {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _send_file(self, kind: str, name: str, revision: str, path: str):
        found = self._find(kind, name, revision, file=True)
        if found is None:
            return
        repo, commit = found
        blob = repo.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if blob is None:
            self._send(404, headers | {"X-Error-Code": "EntryNotFound"})
        elif blob.large:
            place = f"http://localhost:{self.server.server_port}/cdn/{kind}/{name}/{commit}/{path}"
            linked = {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size), "Location": place}
            self._send(302, headers | linked)
        else:
            self._send_blob(repo, path, blob, headers)

    def _send_blob(self, repo: Repo, path: str, blob: Blob, headers: dict[str, str]):
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        headers = headers | {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{blob.size - 1}/{blob.size}"
        self._send(206 if wanted else 200, headers, size=blob.size - start)
        if self.command == "HEAD":
            return
        left, times = repo.cuts.get(path, (blob.size, 0))
        if times:
            repo.cuts[path] = (left, times - 1)
        for piece in blob.read(start):
            self.wfile.write(piece[:left] if times else piece)
            left -= len(piece)
            if times and left <= 0:
                self.close_connection = True
                return
