"""`collect` against a small server on this machine: retries, resuming, refusals, and answers
without token ids."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specnb_audit import cli
from specnb_audit.cli import collect as module
from specnb_audit.cli.collect import collect, token_ids
from specnb_audit.cli.settings import Settings
from specnb_audit.token_file import read_tokens

OK = b"HTTP/1.1 200 \r\n\r\n"
PROMPTS = [[0, number] for number in range(1, 8)]


class Server(ThreadingHTTPServer):
    """Continues a prompt with its tokens plus 10. The first requests are answered with `failures`,
    in order."""

    url: str

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.instead: Callable[[Handler], None] | None = None
        self.answer: Callable[[dict[str, Any]], Any] = lambda sent: {
            "choices": [{"text": "?", "token_ids": [token + 10 for token in sent["prompt"]]}]
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            failure = self.server.failures.pop(0) if self.server.failures else None
            self.server.requests.append(sent)
        if self.server.instead:
            return self.server.instead(self)
        self.reply(failure or 200, {"error": "no"} if failure else self.server.answer(sent))

    def reply(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as here:
        thread = threading.Thread(target=here.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        here.url = f"http://127.0.0.1:{here.server_port}"
        yield here
        here.shutdown()
        thread.join()


def expected(prompts: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], list[int]]]:
    return [(prompt, [token + 10 for token in prompt]) for prompt in prompts]


def test_tokens_arrive_in_the_order_of_the_prompts_in_the_audits_format(server: Server, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "tokens.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    given = ["collect", "--url", server.url, "--prompts", str(prompts), "--out", str(out), "--temperature", "0.7"]
    assert cli.main([*given, "--extra", '{"ignore_eos": true}']) == 0
    assert [(one.prompt, one.tokens) for one in read_tokens(out)] == expected(PROMPTS)
    sent = server.requests[0]
    assert (sent["model"], sent["temperature"], sent["min_p"], sent["ignore_eos"]) == ("small", 0.7, 0.0, True)
    assert len({one["seed"] for one in server.requests}) == len(PROMPTS)


def test_a_server_that_stays_busy_ends_it_and_what_arrived_is_continued(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "tokens.jsonl"
    collect(server.url, PROMPTS[:3], out, parallel=1, say=None)
    server.failures = [503] * 3
    said: list[str] = []
    with pytest.raises(OSError, match=r"failed 3 times.*503"):
        collect(server.url, PROMPTS, out, parallel=1, retries=2, wait=0.01, say=said.append)
    assert [line[-24:] for line in said] == ["; trying again in 0.01 s", "; trying again in 0.02 s"]
    with out.open("a") as file:
        file.write('{"prompt": [0,')  # a line that was cut off
    server.requests.clear()
    assert collect(server.url, PROMPTS, out, parallel=1, say=None) == len(PROMPTS) - 3
    assert [one["prompt"] for one in server.requests] == PROMPTS[3:]
    assert [(one.prompt, one.tokens) for one in read_tokens(out)] == expected(PROMPTS)
    assert collect(server.url, PROMPTS, out, say=None) == 0


def test_a_file_made_with_other_settings_is_not_continued(server: Server, tmp_path: Path) -> None:
    out, cooler = tmp_path / "tokens.jsonl", Settings(temperature=0.7)
    collect(server.url, PROMPTS[:2], out, cooler, extra={"echo": False}, say=None)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"made with temperature 0.7, not 1.0; extra \{'echo': False\}, not \{\}\."):
        collect(server.url, PROMPTS, out, say=None)
    assert out.read_bytes() == before


def dripping(handler: Handler) -> None:
    """Something arrives all the time, and the answer is never complete."""
    with suppress(OSError):  # the client leaves
        for byte in OK + b" " * 100:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (dripping, r"did not answer in full within 0.2 seconds; a slow server needs more \(--timeout\)"),
        (lambda handler: handler.wfile.write(OK + b" " * 2000), r"answered 200 \(1,000 bytes\)"),
        (lambda handler: handler.wfile.write(b"HTTP/1.1 307 \r\nLocation: http://a/b\r\n\r\n"), "307 .* http://a/b"),
        (lambda handler: handler.reply(200, {"tokens": [1] * 100}), "answered with 100 tokens to a request for 3"),
        (lambda handler: handler.reply(200, {"tokens": [2**80]}), r"has no token ids from 0 to 2\^63 - 1"),
        (lambda handler: handler.reply(200, {"tokens": [-1]}), r"has no token ids from 0 to 2\^63 - 1"),
    ],
)
def test_what_no_server_should_do_ends_it_and_leaves_no_file(
    server: Server, instead: Callable[[Handler], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST_ANSWER", 1000)
    server.instead = instead
    with pytest.raises((ValueError, OSError), match=words):
        collect(server.url, PROMPTS[:1], tmp_path / "tokens.jsonl", Settings(max_new_tokens=3), timeout=0.2, say=None)
    assert not (tmp_path / "tokens.jsonl").exists()


def test_an_answer_that_never_ends_leaves_no_file_and_holds_up_nothing(server: Server, tmp_path: Path) -> None:
    """Not while it is waited for either; and an error of one request does not wait for the answers
    to others."""
    out, begun, go_on = tmp_path / "tokens.jsonl", threading.Barrier(2), threading.Event()

    def waiting(handler: Handler) -> None:
        if begun.wait(10) == 0:
            assert not out.exists()
            return handler.reply(400, {})
        # Far longer than this test takes, and than the client waits once the other request has
        # failed.
        go_on.wait(60)

    server.instead = waiting
    with pytest.raises(ValueError, match="answered 400"):
        collect(server.url, PROMPTS[:2], out, parallel=2, timeout=50, say=None)
    alive = not go_on.is_set()
    go_on.set()
    assert alive
    assert not out.exists()


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"token_ids": [5, 7]}]},
        {"choices": [{"text": "", "tokens": [5, 7]}]},
        {"choices": [{"text": ""}], "__verbose": {"tokens": [5, 7]}},
        {"tokens": [5, 7], "content": ""},
        {"meta_info": {"output_ids": [5, 7]}},
    ],
)
def test_ids_are_found_where_servers_put_them(answer: dict[str, Any]) -> None:
    assert token_ids(answer, [0]) == [5, 7]


def test_a_server_that_adds_to_the_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="a prompt of 2 tokens, not the 1"):
        token_ids({"choices": [{"token_ids": [5], "prompt_token_ids": [0, 1]}]}, [1])


@pytest.mark.parametrize("old", [b"notes", b'{"prompt": [9], "tokens": [7]}\n', b"\x1f\x8b\x00", b"[1]"])
def test_a_file_of_something_else_is_never_changed(server: Server, old: bytes, tmp_path: Path) -> None:
    out = tmp_path / "tokens.jsonl"
    out.write_bytes(old)
    with pytest.raises(ValueError, match=r"tokens.jsonl, line 1 is not for prompt 1: the file is of other prompts"):
        collect(server.url, PROMPTS, out, say=None)
    assert out.read_bytes() == old


def test_a_local_server_is_asked_past_a_proxy(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is not, and then the error names the proxy."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert collect(server.url, PROMPTS[:1], tmp_path / "a.jsonl", say=None, retries=0) == 1
    assert module.proxy_of("http://example.org/v1") == "http://127.0.0.1:9"
    assert module.proxy_of("http://localhost:8000/v1") is None
    monkeypatch.setenv("no_proxy", "example.org")
    assert module.proxy_of("http://example.org/v1") is None
