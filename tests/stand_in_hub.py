"""A Hugging Face hub on loopback with small data sets in the formats of real ones.

The server answers the requests of `datasets` and `huggingface_hub` for data sets. A process reads the address from
`HF_ENDPOINT` when it imports these libraries.
"""

import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LICENCE = "mit"


@dataclass(frozen=True)
class StandInHub:
    """The address of the hub, and the environment of a process that uses it with an empty cache."""

    endpoint: str
    environment: dict[str, str]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ultrafeedback(train: int, test: int) -> dict[str, bytes]:
    """Return files in the format of HuggingFaceH4/ultrafeedback_binarized: messages, scores, and several splits."""

    def rows(name: str, count: int) -> bytes:
        table = []
        for number in range(count):
            prompt = f"{name}: what is {number} plus {number}?"
            answers = {"chosen": f"It is {2 * number}.", "rejected": f"No idea about {number}."}
            sides = {k: [message("user", prompt), message("assistant", text)] for k, text in answers.items()}
            scores = {"score_chosen": 8.0, "score_rejected": 3.0}
            table.append({"prompt": prompt, "prompt_id": str(number), **sides, "messages": sides["chosen"], **scores})
        return parquet(table)

    splits = {"train_prefs": train, "test_prefs": test, "train_sft": 3, "test_sft": 3}
    files = {f"data/{name}-00000-of-00001.parquet": rows(name, count) for name, count in splits.items()}
    lines = ["configs:", "- config_name: default", "  data_files:"]
    for name in splits:
        lines += [f"  - split: {name}", f"    path: data/{name}-*"]
    return {"README.md": card(lines), **files}


def card(lines: list[str]) -> bytes:
    return "\n".join(["---", f"license: {LICENCE}", *lines, "---", "# A data set", ""]).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@contextmanager
def serve(data_sets: Mapping[str, Mapping[str, bytes]], cache: Path) -> Iterator[StandInHub]:
    """Serve `{name: {path: content}}` on a free port while the context is open. `cache` becomes HF_HOME."""
    handler = type("Handler", (_Handler,), {"data_sets": data_sets})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
        yield StandInHub(endpoint, environment)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    data_sets: Mapping[str, Mapping[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bytes = b"") -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "datasets"]
        rest = parts[2:] if is_api else parts[1:]
        files = self.data_sets.get("/".join(rest[:2]))
        if files is None or not (is_api or parts[0] == "datasets"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif not is_api:
            self._send_file(files, "/".join(rest[4:]))
        elif rest[2:3] == ["tree"]:
            self._send_json(self._children(files, "".join(f"{folder}/" for folder in rest[4:])))
        elif rest[2:3] == ["paths-info"]:
            self._send_json([self._entry(files, name) for name in self._requested_paths(body) if name in files])
        else:
            self._send_json(self._info("/".join(rest[:2]), files))

    def _requested_paths(self, body: bytes) -> list[str]:
        try:
            return list(json.loads(body)["paths"])
        except ValueError:  # a form: paths=a&paths=b
            return [unquote(pair.partition("=")[2]) for pair in body.decode().split("&") if pair.startswith("paths=")]

    def _info(self, name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in files]
        shared = {"lastModified": "2026-01-01T00:00:00.000Z", "private": False, "gated": False, "disabled": False}
        return {"id": name, "sha": COMMIT, **shared, "tags": [], "siblings": siblings, "cardData": {"license": LICENCE}}

    def _children(self, files: Mapping[str, bytes], prefix: str) -> list[dict[str, Any]]:
        """Return the files and the folders directly below a folder, whose path ends with a slash."""
        below = [name.removeprefix(prefix) for name in files if name.startswith(prefix)]
        folders = dict.fromkeys(name.partition("/")[0] for name in below if "/" in name)
        entries = [{"type": "directory", "path": prefix + name, "size": 0, "oid": COMMIT} for name in folders]
        return entries + [self._entry(files, prefix + name) for name in below if "/" not in name]

    def _entry(self, files: Mapping[str, bytes], path: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}

    def _send_file(self, files: Mapping[str, bytes], path: str) -> None:
        if path in files:
            headers = {"ETag": f'"{_oid(files[path])}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            self._send(200, files[path], headers)
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        span = self.headers.get("Range", "")
        if status == 200 and span.startswith("bytes="):
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content) - 1), len(content) - 1)
            headers = {**headers, "Content-Range": f"bytes {first}-{end}/{len(content)}"}
            status, content = 206, content[int(first) : end + 1]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
