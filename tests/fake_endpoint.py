"""A local server that behaves like vLLM's completions API, as far as the engine uses it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, object]  # bytes are sent as they are, all else as JSON


def completion(body: dict, ids: list[int], reason: str = "stop", **choice) -> Reply:
    """vLLM's response to a request that asked for token ids, or not."""
    text = choice.pop("text", "text that is not to be used")
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    found = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
    if body.get("return_token_ids"):
        found |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
    found |= choice
    response = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
    return 200, response | {"choices": [found], "usage": usage | {"total_tokens": 0}}


def failure(status: int, message: str, **more) -> Reply:
    return status, {"error": {"message": message, "type": "error", "code": status} | more}


def in_turn(*replies):
    """Every prompt meets these replies in turn, the last one for good."""
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def reply(body: dict):
        with lock:
            turn = seen.get(key := str(body["prompt"]), 0)
            seen[key] = turn + 1
        return replies[min(turn, len(replies) - 1)](body)

    return reply


class FakeEndpoint:
    """Answers every request by `reply(body)`; keeps what it was sent, and counts what was under way."""

    def __init__(
        self,
        reply: Callable[[dict], Reply],
        models: tuple[str, ...] | None = ("tiny",),
        listed: object = ...,
        content_type: str = "application/json",
    ):
        self.reply, self.models = reply, models
        self.listed, self.content_type = listed, content_type
        self.bodies: list[dict] = []
        self.authorizations: list[str | None] = []
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        self.url = ""

    def list_models(self) -> Reply:
        if self.listed is not ...:  # whatever it is
            return 200, self.listed
        if self.models is None:
            return failure(404, "Not Found")
        return 200, {"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]}

    def complete(self, body: dict) -> Reply:
        with self.lock:
            self.bodies.append(body)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return self.reply(body)
        finally:
            with self.lock:
                self.under_way -= 1


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """The endpoint at its `url` while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            endpoint.authorizations.append(self.headers.get("Authorization"))
            known = self.path == "/v1/models"
            self.send(*(endpoint.list_models() if known else failure(404, "Not Found")))

        def do_POST(self) -> None:
            endpoint.authorizations.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path == "/v1/completions"
            self.send(*(endpoint.complete(body) if known else failure(404, "Not Found")))

        def send(self, status: int, value: object) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", endpoint.content_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header(
                "retry-after-ms", "10"
            )  # the client's own first pause is half a second
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that gave up waiting
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
