"""A hub on this machine: the HTTP requests that listing and downloading a model make, answered from memory."""

import hashlib
import http.server
import json

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The part of the hub's HTTP interface that listing and downloading a model uses."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, body = hub.answer(self.path.partition("?")[0].strip("/").split("/"))
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, path: list[str]) -> tuple[int, dict[str, str], bytes]:
        match path:
            case ["api", "models", owner, name, *_] if f"{owner}/{name}" in self.errors:
                status, code = self.errors[f"{owner}/{name}"]
                return status, {"X-Error-Code": code}, b""
            case ["api", "models", owner, name, "revision", _] if f"{owner}/{name}" in self.files:
                return 200, {}, json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []}).encode()
            case ["api", "models", owner, name, "tree", _] if f"{owner}/{name}" in self.files:
                tree = [
                    {"type": "file", "path": path, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for path, body in self.files[f"{owner}/{name}"].items()
                ]
                return 200, {}, json.dumps(tree).encode()
            case [owner, name, "resolve", _, *file] if "/".join(file) in self.files.get(f"{owner}/{name}", {}):
                body = self.files[f"{owner}/{name}"]["/".join(file)]
                return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
