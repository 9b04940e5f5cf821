"""The prompts of the engines' audits: pieces of the held-out files. `python -m studies.engines.engine_prompts`."""

from __future__ import annotations

import json
import random

from specnb.models.loading import Pair, load_pair
from specnb.notebook import corpus
from specnb.notebook.corpus import DATA
from specnb.notebook.findings import write

FILE = DATA / "engines" / "prompts.jsonl"
COUNT = 256
LENGTHS = (12, 44)  # tokens, the first of which begins the text


def prompts(pair: Pair, count: int = COUNT) -> list[list[int]]:
    """`count` prompts of 12 to 44 tokens; each starts at a line of a held-out file, all files in turn."""
    generator = random.Random(0)
    texts = corpus.read("held-out")
    made = []
    for number in range(count):
        lines = texts[number % len(texts)].splitlines(keepends=True)
        start = generator.randrange(max(1, len(lines) - 40))
        made.append(pair.encode("".join(lines[start : start + 40]))[: generator.randint(*LENGTHS)])
    return made


def main() -> None:
    """Writes the file of prompts."""
    made = prompts(load_pair(packed=False))
    write(FILE, "".join(json.dumps(prompt) + "\n" for prompt in made))
    print(f"{len(made)} prompts in {FILE.name}")


if __name__ == "__main__":
    main()
