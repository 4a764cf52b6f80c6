"""A small Hugging Face hub for tests, in as much as huggingface_hub asks of it: listings, heads, bodies with ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1_000  # bytes from which a file is known by its SHA-256 (LFS), not by git's name for it


@dataclass
class Hub:
    """repos: files by `models/ORG/NAME` or `datasets/ORG/NAME`; each has the revisions `main`, `v1` and COMMIT.

    cut: a body ends after so many bytes, once. status: every request is answered with it. wrong: bytes are swapped.
    """

    url: str
    repos: dict[str, dict[str, bytes]]
    cut: int | None = None
    status: int | None = None
    error: str = ""
    wrong: bool = False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def hub(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repos)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        known: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(self.path.partition("?")[0])
        known.requests.append((self.command, path, self.headers.get("Range")))
        if known.status is not None:
            return self.fail(known.status, known.error)
        listing = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/([^/]+)", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if listing:
            repo, revision = f"{listing[1]}/{listing[2]}", listing[3]
        elif file:
            repo, revision = f"{'datasets' if file[1] else 'models'}/{file[2]}", file[3]
        else:
            return self.fail(404, "")
        if repo not in known.repos:
            return self.fail(401, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self.fail(404, "RevisionNotFound")
        files = known.repos[repo]
        if listing:
            siblings = [told(name, content) for name, content in files.items()]
            content = json.dumps({"id": listing[2], "sha": COMMIT, "siblings": siblings}).encode()
            return self.send(content, body=body)
        assert file is not None
        if file[4] not in files:
            return self.fail(404, "EntryNotFound")
        return self.send_file(known, files[file[4]], body=body)

    def send_file(self, known: Hub, content: bytes, *, body: bool) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(content)}"', "Accept-Ranges": "bytes"}
        sent = content[start:][::-1] if known.wrong else content[start:]
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body and known.cut is not None and known.cut < len(sent):
            cut, known.cut = known.cut, None
            self.head(206 if start else 200, len(sent), headers)
            self.wfile.write(sent[:cut])
            self.wfile.flush()
            self.close_connection = True
            return
        self.send(sent, body=body, status=206 if start else 200, headers=headers)

    def send(
        self, content: bytes, *, body: bool, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.head(status, len(content), headers or {})
        if body:
            self.wfile.write(content)

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def fail(self, status: int, code: str) -> None:
        self.send(b"", body=True, status=status, headers={"X-Error-Code": code} if code else {})


def etag(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def told(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": etag(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {"size": len(content), "sha256": etag(content), "pointerSize": 130}
    return entry
