"""`specnb collect`: token ids from a server with the OpenAI-compatible completions API: vLLM, llama.cpp, SGLang.

Prompts are sent as token ids to `<url>/v1/completions`. Servers return the ids of a completion in one of the places
that `token_ids` knows, if asked; a server that returns only text cannot be audited, because text does not determine its
tokens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specnb_audit.cli.settings import Request, Settings, add_settings, requests, settings_of
from specnb_audit.cli.tokens_out import complete_lines, read_prompts, to_stderr, write_tokens

RETRIES = 5
TIMEOUT = 300.0  # seconds for one completion
PARALLEL = 4
MOST = 10_000_000  # completions: all their prompts are in memory
MOST_RETRIES = 20  # the last would come after days
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
BLOCK = 64  # requests waiting at most, so that memory does not grow with the number of prompts

# What the servers call the same thing; each ignores the names that it does not know.
ASK_FOR_IDS = {
    "return_token_ids": True,  # vLLM
    "return_tokens": True,  # llama.cpp
    "verbose": True,  # llama.cpp, which puts the ids beside its own answer
}


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
    say: Callable[[str], None] | None = to_stderr,
    bar: bool = False,
) -> int:
    """Collects completions into the file `out`, in the form that `specnb audit` reads; returns how many were added.

    url        of the server, such as http://localhost:8000, with or without /v1 and a slash
    prompts    token ids, begin-of-text token included, or a file of them (`tokens_out.read_prompts`)
    model      the name that the server knows its model by; default: the first that `/v1/models` lists
    extra      more entries of each request, such as `{"ignore_eos": True}`
    count      completions; prompts are repeated with new seeds (default: one for each prompt)
    parallel   requests that are sent at the same time
    retries    further attempts after a refused connection, a time-out, or a status that says to try again, each after
               twice the time of the one before, the first after `wait` seconds
    say        gets a line about the progress now and then
    bar        whether to show a progress bar

    Called again with the same arguments it continues `out`. Raises `ValueError` for an answer without token ids and for
    a request that the server refuses, `OSError` where it cannot be reached.
    """
    ranges = {"count": (count, 0, MOST), "parallel": (parallel, 1, MOST), "retries": (retries, 0, MOST_RETRIES)}
    for what, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise ValueError(f"{what} is {value}; it must be from {least} to {most:,}")
    if isinstance(prompts, Path):
        if prompts.exists() and out.exists() and out.samefile(prompts):
            raise ValueError(f"{out} is the file of prompts; give another file for the tokens")
        prompts = read_prompts(prompts)
    asked = requests(prompts, settings, count)
    done = complete_lines(out, [one.prompt for one in asked])
    rest = asked[done:]
    if not rest:
        return 0
    base = url.rstrip("/").removesuffix("/v1")
    send = Sender(f"{base}/v1", retries, wait)
    name = model or send.first_model()

    def completion(request: Request) -> list[int]:
        return token_ids(send("completions", body(request, settings, name) | (extra or {})), request.prompt)

    def completions() -> Iterator[list[int]]:
        with ThreadPoolExecutor(parallel) as pool:
            for start in range(0, len(rest), BLOCK):
                yield from pool.map(completion, rest[start : start + BLOCK])

    made = tqdm(completions(), "collect", len(rest), unit="completion", disable=not bar)
    write_tokens(out, [one.prompt for one in rest], made, say)
    return len(rest)


def body(request: Request, settings: Settings, model: str) -> dict[str, Any]:
    """The request for one completion; filters that are off are sent as off, because servers have other defaults."""
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
        **ASK_FOR_IDS,
    }


def token_ids(answer: dict[str, Any], prompt: Sequence[int]) -> list[int]:
    """The ids of the completion in a server's answer. Raises `ValueError` if there are none.

    Where the answer also says which prompt the server saw, that must be the one sent: a server that puts a
    begin-of-text token before it would be audited with the wrong prompt.

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
        if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
            return ids
    raise ValueError(
        f"the server's answer has no token ids, only {sorted(choice) or sorted(answer)}; vLLM returns them from 0.10.2 "
        "(return_token_ids), llama.cpp with return_tokens; text alone cannot be audited"
    )


def _first(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """The object at `name` in an answer, or the first of a list of them; an empty one for anything else."""
    found = answer.get(name)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


class Sender:
    """Sends JSON to a server and tries again where that can help."""

    def __init__(self, base: str, retries: int, wait: float) -> None:
        self.base, self.retries, self.wait = base, retries, wait

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer, decoded. Raises `ValueError` if the server refuses, `OSError` after the last attempt."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self.base}/{path}", data, {"Content-Type": "application/json"})
        except ValueError as error:
            raise ValueError(f"{self.base}/{path} is no URL ({error}); it begins with http://") from None
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    found = json.loads(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    words = error.read(500).decode("utf-8", "replace")
                if error.code not in TRY_AGAIN:
                    raise ValueError(f"{self.base}/{path} answered {error.code}: {words}") from None
                last: Exception = OSError(f"{self.base}/{path} answered {error.code}: {words}")
            except http.client.InvalidURL as error:
                raise ValueError(f"{self.base}/{path} is no URL ({error})") from None
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                last = error
            else:
                if not isinstance(found, dict):
                    raise ValueError(f"{self.base}/{path} answered with JSON that is no object; is this the right URL?")
                return found
            if attempt < self.retries:
                time.sleep(self.wait * 2**attempt)
        raise OSError(f"{self.base}/{path} failed {self.retries + 1} times; the last time: {last}")

    def first_model(self) -> str:
        """The name of the first model that the server lists. Raises `ValueError` if it lists none."""
        name = _first(self("models"), "data").get("id")
        if not name:
            raise ValueError(f"{self.base}/models lists no model; name one with --model")
        return str(name)


EXAMPLES = """\
examples:
  specnb collect --url http://localhost:8000 --prompts prompts.jsonl --out tokens.jsonl --temperature 0.7 --top-p 0.9
      one completion for each line of prompts.jsonl, which is a list of token ids; run again, it continues
  specnb collect --url http://localhost:8000 --prompts prompts.jsonl --out tokens.jsonl --extra '{"ignore_eos": true}'
      completions of full length, where the server can ignore end tokens without changing the distribution
"""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers `commands`; its options have a function `run`."""
    words = "collect token ids from an OpenAI-compatible server"
    parser = commands.add_parser("collect", help=words, description=words.capitalize() + ".")
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
    add("--extra", type=_object, default={}, metavar="JSON", help="more entries of each request")
    add_settings(add)


def _object(words: str) -> dict[str, Any]:
    try:
        found = json.loads(words)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("give a JSON object, such as '{\"ignore_eos\": true}'")
    return found


def run(options: argparse.Namespace) -> int:
    """Collects what the options ask for; returns the exit status 0. Raises what `collect` raises."""
    more: dict[str, Any] = {"model": options.model, "extra": options.extra, "count": options.count}
    more |= {"parallel": options.parallel, "retries": options.retries}
    if sys.stderr is not None and sys.stderr.isatty():
        more |= {"say": None, "bar": True}
    collect(options.url, options.prompts, options.out, settings_of(options), **more)
    return 0
