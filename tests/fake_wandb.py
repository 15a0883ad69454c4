"""A wandb server on this machine that knows just enough to take a run, and a way of failing."""

import atexit
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal

Behaviour = Literal["well", "errors", "hangs", "slow", "garbage", "forbids"]
HANGS = 120.0  # seconds: longer than any test waits


class FakeWandb(ThreadingHTTPServer):
    """`steps`: of the rows of history that came in. Whatever brings more than `patience` of them, and all that comes
    later, it answers with 500 ("errors") or never ("hangs")."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, behaviour: Behaviour, patience: int = 20) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.behaviour, self.patience = behaviour, patience
        self.steps: list[int] = []
        self.exit_codes: list[Any] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is what these tests are about."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeWandb

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.reply(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        server = self.server
        if self.path.endswith("/file_stream"):
            sent = json.loads(body)
            rows = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            server.steps += [json.loads(row)["_step"] for row in rows]
            server.exit_codes += [sent["exitcode"]] if sent.get("complete") else []
        tired = len(server.steps) > server.patience
        if server.behaviour == "hangs" and tired:
            server.closing.wait(HANGS)
        if server.behaviour == "slow":
            server.closing.wait(1.0)
        if server.behaviour == "errors" and tired:
            self.reply(500, {})
        elif server.behaviour == "forbids":
            self.reply(403, {"errors": [{"message": "permission denied"}]})
        elif self.path.endswith("/graphql"):
            self.reply(200, self.graphql(json.loads(body)))
        else:
            self.reply(200, {})

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        given = asked["variables"]
        if asked.get("operationName") == "UpsertBucket":
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "i", "name": given["name"], "displayName": "d", "config": "{}", "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}}
        if asked.get("operationName") == "CreateRunFiles" and self.server.behaviour != "garbage":
            files = [{"name": name, "uploadUrl": f"{self.server.url}/{name}"} for name in given["files"]]
            return {"data": {"createRunFiles": {"runID": "i", "uploadHeaders": [], "files": files}}}
        return {"data": {}}  # "garbage": on this, wandb 0.31's own process crashes when the run ends

    def reply(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_wandb(behaviour: Behaviour) -> Iterator[FakeWandb]:
    server = FakeWandb(behaviour)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def deaf_server() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            for connection in held:
                connection.close()


def refusing_url() -> str:
    """Of a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def timed(file: Path) -> None:
    """In the process of a run: writes to `file` how long wandb took to begin and to end, in seconds. What is done when
    a process ends is done, as in one that was started by hand."""
    import wandb  # noqa: F401  # its import is none of the server's doing

    from softattn_lm.training import fit

    spent: dict[str, float] = {}

    def watched(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given)
            finally:
                spent[name] = time.perf_counter() - began
                file.write_text(json.dumps(spent))

        return call

    Finalize(None, atexit._run_exitfuncs, exitpriority=0)
    fit.make_loggers, fit.finish_loggers = watched("begin", fit.make_loggers), watched("end", fit.finish_loggers)
