"""The Hugging Face Hub's HTTP, as far as models are downloaded by it, on a port of this machine."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"


@dataclass
class Repository:
    """`revisions`: a branch's or tag's name -> its files. `token`: what a client needs to see it. `gated`: it may know
    that the repository is there, and no more."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: bool = False

    def commit(self, revision: str) -> str:
        files = self.revisions[revision]
        return hashlib.sha1(revision.encode() + b"".join(files[name] for name in sorted(files))).hexdigest()

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.revisions.items():
            if revision in (name, self.commit(name)):
                return self.commit(name), files
        return None


@dataclass(frozen=True)
class Asked:
    """One request that came."""

    method: str
    path: str
    host: str
    token: str | None
    range: str | None


@dataclass
class FakeHub:
    """`cut`: a file's name -> after how many bytes its connection breaks, once or, with `cut_always`, each time.
    `slow`: files that come a byte at a time behind the first. `commit`: what it says instead of a commit.
    `status`: what everything is answered. `silent`: nothing is answered."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    cut_always: bool = False
    slow: set[str] = field(default_factory=set)
    commit: str | None = None
    status: int | None = None
    silent: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose contents were sent, in order."""
        return [file_name(one) for one in self.sent]

    @property
    def sent(self) -> list[Asked]:
        """Requests that were answered with contents of files."""
        large = [one for one in self.asked if one.path.startswith("/storage/") or not one.path.endswith(LARGE)]
        return [one for one in large if one.method == "GET" and "/api/" not in one.path]

    def forget(self) -> None:
        self.asked.clear()


def file_name(asked: Asked) -> str:
    return asked.path.rpartition("/")[2]


def files_in(folder: Path) -> dict[str, bytes]:
    """A folder's files, to be put into a repository."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub without repositories. Large files lie on another host, as the hub's do: whoever asks there is sent no
    token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = server.hub = FakeHub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # headers and bodies are two packets
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    @property
    def _hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined]

    def _answer(self) -> None:
        token = self.headers.get("Authorization")
        path = unquote(urlsplit(self.path).path)
        asked = Asked(self.command, path, self.headers["Host"], token, self.headers.get("Range"))
        self._hub.asked.append(asked)
        if self._hub.silent:
            self._hub.ended.wait(60)
            self.close_connection = True
            return
        if self._hub.status is not None:
            self._refuse(self._hub.status, "")
            return
        on_storage = path.startswith("/storage/")
        name, repository = self._named(path)
        if repository is None or not (on_storage or token == _bearer(repository.token) or repository.token is None):
            self._refuse(401, "RepoNotFound")
            return
        rest = path.partition(name)[2].split("/")[1:]
        if rest[:1] in ([], ["revision"]):
            self._at(repository, rest[1] if rest[1:] else "main", self._send_info)
        elif rest[0] == "tree":
            self._at(repository, rest[1], self._send_tree)
        elif repository.gated:
            self._refuse(403 if token else 401, "GatedRepo")
        else:
            self._at(repository, rest[1], lambda commit, files: self._send_file(commit, files, rest[2], on_storage))

    def _named(self, path: str) -> tuple[str, Repository | None]:
        for name, repository in self._hub.repositories.items():
            if f"/{name}/" in f"{path}/":
                return name, repository
        return "", None

    def _at(self, repository: Repository, revision: str, send: "Callable[[str, dict[str, bytes]], None]") -> None:
        found = repository.files_at(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound")
        else:
            send(*found)

    def _send_info(self, commit: str, files: dict[str, bytes]) -> None:
        self._send_json(
            {
                "id": "fake",
                "sha": self._hub.commit or commit,
                "siblings": [{"rfilename": file} for file in sorted(files)],
            }
        )

    def _send_tree(self, commit: str, files: dict[str, bytes]) -> None:
        self._send_json(
            [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in sorted(files.items())
            ]
        )

    def _send_file(self, commit: str, files: dict[str, bytes], file: str, on_storage: bool) -> None:
        content = files.get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file.endswith(LARGE) and not on_storage:
            port = self.server.server_address[1]
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            headers["Location"] = f"http://localhost:{port}/storage{urlsplit(self.path).path}"
            self._send(302, b"", headers)
            return
        first, last = 0, len(content) - 1
        if self.headers.get("Range"):
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        status, body = 206 if "Content-Range" in headers else 200, content[first : last + 1]
        if self.command == "GET" and file in self._hub.slow:
            self._send(status, body, headers, cut=1)
            self._trickle(body[1:])
        else:
            self._send(status, body, headers, self._cut(file))

    def _trickle(self, body: bytes) -> None:
        for byte in body:
            if self._hub.ended.wait(0.05):
                return
            try:
                self.wfile.write(bytes([byte]))
            except ConnectionError:  # the client has gone
                return

    def _cut(self, file: str) -> int | None:
        if self.command != "GET":
            return None
        return self._hub.cut.get(file) if self._hub.cut_always else self._hub.cut.pop(file, None)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def _bearer(token: str | None) -> str:
    return f"Bearer {token}"
