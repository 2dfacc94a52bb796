"""A stand-in for the Hugging Face hub: what ``huggingface_hub`` asks of it to take an upload, over real HTTP.

It keeps repositories in memory and knows one token. Storage by Xet is not part of it.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_right"
USER = "alice"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by repository and revision, ``name@revision``."""
    private: dict[str, bool] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Requests(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/whoami-v2":
            self.answer({"type": "user", "name": USER, "orgs": []})
        else:
            self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        content = self.body()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(content))
        elif found := re.fullmatch(r"/api/models/(\S+)/branch/(\S+)", path):
            self.hub.repos[f"{found[1]}@{found[2]}"] = dict(self.hub.repos[f"{found[1]}@main"])
            self.answer({})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(content)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in files}
            self.answer(
                {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]}
            )
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            uploads = [{"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}} for one in objects]
            pairs = zip(objects, uploads, strict=True)
            self.answer({"transfer": "basic", "objects": [one | {"actions": actions} for one, actions in pairs]})
        elif found := re.fullmatch(r"/api/models/(\S+)/commit/(\S+)", path):
            self.commit(found[1], found[2], [json.loads(line) for line in content.splitlines()])
        else:
            self.answer({"error": f"not part of the stand-in: {path}"}, 404)

    def create(self, wanted: dict[str, str]) -> None:
        owner = wanted.get("organization") or USER
        if owner != USER:
            self.answer({"error": f"You don't have the rights to create a model under the namespace {owner!r}"}, 403)
            return
        name = f"{owner}/{wanted['name']}"
        is_new = f"{name}@main" not in self.hub.repos
        self.hub.repos.setdefault(f"{name}@main", {})
        if is_new:
            self.hub.private[name] = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.answer({"url": f"{self.hub.url}/{name}", "name": name}, 200 if is_new else 409)

    def commit(self, name: str, revision: str, lines: list[dict[str, dict[str, str]]]) -> None:
        files = self.hub.repos[f"{name}@{revision}"]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
        self.answer({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}"})


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("HubRequests", (Requests,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
