"""`specnb-audit collect`: token ids from a server with the OpenAI-compatible completions API.

Prompts are sent as token ids to `<url>/v1/completions`. A server that returns text alone cannot be
audited, because text does not determine its tokens.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specnb_audit.cli.settings import Request, Settings, add_settings, requests, settings_of
from specnb_audit.cli.tokens_out import Say, complete_lines, parsed, read_prompts, to_stderr, write_tokens
from specnb_audit.token_file import LARGEST

RETRIES = 3
TIMEOUT = 120.0
PARALLEL = 4
LARGEST_ANSWER = 2**26  # bytes
MOST = 10_000_000  # completions: all their prompts are in memory
MOST_RETRIES = 20  # the last would come after days
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
BLOCK = 64  # requests waiting at most, so that memory does not grow with the number of prompts

Answer = tuple[int, bytes]

# Returns every status: a redirect that is followed turns a POST into a GET.
OPENER, DIRECT = urllib.request.OpenerDirector(), urllib.request.OpenerDirector()
for _kind in ("HTTP", "HTTPS", "Unknown"):
    OPENER.add_handler(getattr(urllib.request, f"{_kind}Handler")())
    DIRECT.add_handler(getattr(urllib.request, f"{_kind}Handler")())
OPENER.add_handler(urllib.request.ProxyHandler())


def collect(
    url: str,
    prompts: Sequence[list[int]] | Path,
    out: Path,
    settings: Settings = Settings(),
    *,
    model: str | None = None,
    extra: dict[str, Any] | None = None,
    count: int = 0,
    parallel: int = PARALLEL,
    retries: int = RETRIES,
    wait: float = 1.0,
    timeout: float = TIMEOUT,
    say: Say = to_stderr,
) -> int:
    """Collect completions into the file `out`, in the form that the audit reads.

    Called again with the same arguments it continues `out`.

    Parameters
    ----------
    url : str
        Of the server, such as http://localhost:8000, with or without /v1.
    prompts : list of lists of int, or Path
        Token ids, begin-of-text token included, or a file of them.
    model : str, optional
        Default: the first that `/v1/models` lists.
    extra : dict, optional
        More entries of each request, such as `{"ignore_eos": True}`.
    count : int
        Completions; prompts are repeated with new seeds. Default: one for each prompt.
    retries, wait
        Further attempts after a failed connection or a status that says to try again, each after
        twice the time of the one before, the first after `wait` seconds.
    timeout : float
        Seconds until the whole answer must be here, all attempts together.
    say : callable
        Gets lines about attempts and progress.

    Returns
    -------
    int
        How many completions were added.

    Raises
    ------
    ValueError
        For an answer without token ids or with too many, a refused request, and an `out` made with
        other settings.
    OSError
        If the server cannot be reached, or does not answer in time.
    """
    ranges = {
        "count": (count, 0, MOST), "parallel": (parallel, 1, MOST), "retries": (retries, 0, MOST_RETRIES),
        "timeout": (timeout, 0.1, MOST),
    }  # fmt: skip
    for what, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise ValueError(f"{what} is {value}; it must be from {least} to {most:,}")
    if isinstance(prompts, Path):
        if prompts.exists() and out.exists() and out.samefile(prompts):
            raise ValueError(f"{out} is the file of prompts; give another file for the tokens")
        prompts = read_prompts(prompts)
    asked, made_with = requests(prompts, settings, count), asdict(settings) | {"extra": extra or {}}
    whole = [one.prompt for one in asked]
    done = complete_lines(out, whole, made_with | ({"model": model} if model else {}))
    rest = asked[done:]
    if not rest:
        return 0
    base = url.rstrip("/").removesuffix("/v1")
    send = Sender(f"{base}/v1", retries, wait, timeout, say)
    made_with["model"] = name = model or str(_first(send("models"), "data").get("id", ""))
    if not name:
        raise ValueError(f"{base}/v1/models lists no model; name one with --model")
    complete_lines(out, whole, made_with)  # the first model of the server may be another one now

    def completion(request: Request) -> list[int]:
        try:
            return asked_for(request)
        except Exception as error:
            send.end(error)
            raise

    def asked_for(request: Request) -> list[int]:
        sent = body(request, settings, name) | (extra or {})
        ids, most = token_ids(send("completions", sent), request.prompt), sent["max_tokens"]
        if isinstance(most, int) and len(ids) > most:
            raise ValueError(f"the server answered with {len(ids):,} tokens to a request for {most:,} at most")
        return ids

    def completions() -> Iterator[list[int]]:
        with ThreadPoolExecutor(parallel) as pool:
            try:
                for start in range(0, len(rest), BLOCK):
                    yield from pool.map(completion, rest[start : start + BLOCK])
            finally:
                send.end(OSError("interrupted"))

    write_tokens(out, whole[done:], completions(), say, made_with)
    return len(rest)


def body(request: Request, settings: Settings, model: str) -> dict[str, Any]:
    """The request for one completion; filters that are off are sent as off, as servers' defaults
    differ."""
    return {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed,
        "stream": False,
        # The ids; each server ignores the names that it does not know.
        "return_token_ids": True,  # vLLM
        "return_tokens": True,  # llama.cpp
        "verbose": True,  # llama.cpp, which puts the ids beside its own answer
    }


def token_ids(answer: dict[str, Any], prompt: Sequence[int]) -> list[int]:
    """The ids of the completion in a server's answer. Raises `ValueError` if there are none, or if
    the server saw another prompt, as one that adds a begin-of-text token does.

    >>> token_ids({"choices": [{"text": "a", "token_ids": [5, 7]}]}, [1])
    [5, 7]
    """
    choice = _first(answer, "choices")
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != list(prompt):
        count = f"{len(seen)} tokens" if isinstance(seen, list) else "another kind"
        raise ValueError(
            f"the server saw a prompt of {count}, not the {len(prompt)} that were sent; "
            "switch off what it adds, such as a begin-of-text token"
        )
    places = [
        choice.get("token_ids"),
        choice.get("tokens"),
        _first(answer, "__verbose").get("tokens"),
        answer.get("tokens"),
        _first(answer, "meta_info").get("output_ids"),
        answer.get("output_ids"),
    ]
    for ids in places:
        if isinstance(ids, list) and ids and all(type(one) is int and 0 <= one <= LARGEST for one in ids):
            return ids
    raise ValueError(
        f"the server's answer has no token ids from 0 to 2^63 - 1, only {sorted(choice) or sorted(answer)}; vLLM has "
        "them from 0.10.2 on (return_token_ids), llama.cpp with return_tokens; text alone cannot be audited"
    )


def _first(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """The object at `name`, or the first of a list of them; an empty one for anything else."""
    found = answer.get(name)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


class Sender:
    """Sends JSON to a server and tries again where that can help, for `timeout` seconds at most.
    Used by several threads; after an error of one, or Ctrl-C, nobody waits for the others."""

    def __init__(self, base: str, retries: int, wait: float, timeout: float, say: Say) -> None:
        self.base, self.retries, self.wait, self.timeout, self.say = base, retries, wait, timeout, say
        self.ended: Future[None] = Future()

    def end(self, error: Exception) -> None:
        """From now on all calls raise `error`, or that of an earlier end."""
        with suppress(InvalidStateError):
            self.ended.set_exception(error)

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer, decoded. Raises `ValueError` if the server refuses, `OSError` after the last
        attempt."""
        data, url = None if body is None else json.dumps(body).encode(), f"{self.base}/{path}"
        until = time.monotonic() + self.timeout
        for attempt in range(self.retries + 1):
            self.require_going_on()
            try:
                status, content = self.answer_of(url, data, max(until - time.monotonic(), 0.01))
            except (ValueError, http.client.InvalidURL) as error:
                raise ValueError(f"{url} is no URL ({error}); it begins with http://") from None
            except TimeoutError:
                self.require_going_on()
                words = f"{url} did not answer in full within {self.timeout:g} seconds"
                raise OSError(f"{words}; a slow server needs more (--timeout)") from None
            except (OSError, http.client.HTTPException) as error:
                last = str(error)
            else:
                found = parsed(content) if status < 300 else None
                if found is not None:
                    return found
                last = f"answered {status} ({len(content):,} bytes): {content[:500].decode('utf-8', 'replace')}"
                if (proxy := proxy_of(url)) is not None:
                    last += f" (asked by the proxy {proxy}; no_proxy names servers to be asked past it)"
                if status not in TRY_AGAIN:
                    raise ValueError(f"{url} {last}; is this the right URL?")
            pause = self.wait * 2**attempt
            if attempt == self.retries or time.monotonic() + pause > until:
                break
            if self.say:
                self.say(f"{url}: {last}; trying again in {pause:g} s")
            wait_for([self.ended], pause)
        raise OSError(f"{url} failed {attempt + 1} times; the last time: {last}")

    def require_going_on(self) -> None:
        if self.ended.done():
            self.ended.result()

    def answer_of(self, url: str, data: bytes | None, seconds: float) -> Answer:
        """The answer; raises `TimeoutError` after `seconds`, and after an end."""
        answer = exchange(url, data, seconds)
        either: list[Future[Any]] = [answer, self.ended]
        wait_for(either, seconds, FIRST_COMPLETED)
        return answer.result(0)


def is_local(url: str) -> bool:
    """Whether the server is on this machine, which no proxy reaches.

    >>> is_local("http://localhost:8000/v1"), is_local("http://[::1]:80"), is_local("http://example.org")
    (True, True, False)
    """
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_of(url: str) -> str | None:
    """The proxy by which a server is asked; None if directly."""
    parts = urllib.parse.urlsplit(url)
    if is_local(url) or urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def exchange(url: str, data: bytes | None, seconds: float) -> Future[Answer]:
    """The status and content of an answer, or where it redirects to.

    In a thread that can be left behind: the time-out of a socket begins anew with every byte.
    """
    answer: Future[Answer] = Future()

    def receive() -> None:
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            opener = DIRECT if is_local(url) else OPENER
            with opener.open(request, timeout=seconds) as got:
                elsewhere = str(got.headers["Location"]).encode()
                answer.set_result((got.status, elsewhere if 300 <= got.status < 400 else got.read(LARGEST_ANSWER)))
        except Exception as error:  # handed to the caller
            answer.set_exception(error)

    threading.Thread(target=receive, daemon=True).start()
    return answer


EXAMPLES = """\
examples:
  specnb-audit collect --url http://localhost:8000 --prompts prompts.jsonl --out tokens.jsonl --temperature 0.7
      one completion for each line of prompts.jsonl, which is a list of token ids; run again, it continues
  specnb-audit collect --url http://localhost:8000 --prompts prompts.jsonl --out b.jsonl --extra '{"ignore_eos": true}'
      completions of full length, where the server can ignore end tokens without changing the distribution
--speculation, --gamma and --dtype are those that the server was started with: they are recorded, not sent
"""


def add_to(commands: Any) -> None:
    words = "collect token ids from an OpenAI-compatible server"
    usage = "specnb-audit collect --url URL --prompts PROMPTS --out OUT [options]"
    parser = commands.add_parser("collect", usage=usage, help=words, description=words[0].upper() + words[1:] + ".")
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--url", required=True, help="of the server, such as http://localhost:8000")
    add("--prompts", type=Path, required=True, help="a list of token ids a line, begin-of-text included")
    add("--out", type=Path, required=True, help="file of tokens; an existing one is continued")
    add("--model", help="the name that the server knows its model by (default: the first that it lists)")
    add("--count", type=int, default=0, help="completions; prompts are repeated (default: one for each prompt)")
    add("--parallel", type=int, default=PARALLEL, help="requests at the same time (default: %(default)s)")
    add("--retries", type=int, default=RETRIES, help="further attempts for a request (default: %(default)s)")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="seconds for the whole answer to a request (default: %(default)g)",
    )
    add("--extra", type=_object, default={}, metavar="JSON", help="more entries of each request")
    add_settings(add)


def _object(words: str) -> dict[str, Any]:
    if (found := parsed(words)) is None:
        raise argparse.ArgumentTypeError("give a JSON object, such as '{\"ignore_eos\": true}'")
    return found


def run(options: argparse.Namespace) -> int:
    more = {name: getattr(options, name) for name in ("model", "extra", "count", "parallel", "retries", "timeout")}
    collect(options.url, options.prompts, options.out, settings_of(options), **more)
    return 0
