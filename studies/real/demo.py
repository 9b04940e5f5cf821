"""`make demo`: a real model answers two questions, plain and with speculation, and both are timed.

Copies from the text are drafted, and where nothing is to be copied, the tokens of a trained head.
Both answers repeat parts of their prompts; `QUESTIONS` are of data/workloads.jsonl, which has other
kinds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specnb.distributions import Sampling
from specnb.heads import FallbackDrafter
from specnb.ngram import PromptLookupDrafter
from specnb.sampler import Generation, generate
from specnb.statistics import measured_on, ratio_of_medians
from studies.real.smollm2 import as_chat, head_drafter, model_and_tokenizer
from studies.study import timed_in_turn

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
ABOUT = (
    "SmolLM2-135M-Instruct answers two questions whose answers repeat parts of them, which favours copying; the "
    "baseline is plain decoding, not compiled. About a minute on two cores, the first time two (it fetches 93 MB)."
)


def run(new_tokens: int = 64, rounds: int = 3, questions: dict[str, str] = QUESTIONS) -> None:
    """Prints the answers at temperature 0, and how much faster speculation made them."""
    target, tokenizer = model_and_tokenizer("float32")
    for kind, question in questions.items():
        made, seconds = timed(target, as_chat(tokenizer, question), tokenizer.eos_token_id, new_tokens, rounds)
        answer = tokenizer.decode(made["speculative"].tokens[0], skip_special_tokens=True)
        print(f"{kind}: {question}\n\n{answer}\n\n{comparison(made, seconds)}\n")
    print(f"Medians of {rounds} rounds, {measured_on(target.dtype)}")


def timed(
    target: Any, prompt: list[int], eos: int, new_tokens: int, rounds: int
) -> tuple[dict[str, Generation], np.ndarray]:
    """What each of `WAYS` generated, and seconds `(rounds, ways)`, measured in turn."""
    sampling, made = Sampling(temperature=0), dict[str, Generation]()
    copies, head = PromptLookupDrafter(target.config.vocab_size, shortest=2), head_drafter(target, sampling, most=2)
    drafts = dict(zip(WAYS, (None, FallbackDrafter(copies, head, 10)), strict=True))

    def call(way: str, prompt: list[int], _: int) -> None:
        made[way] = generate(
            target, [prompt], drafts[way], max_new_tokens=new_tokens, sampling=sampling, eos=eos, progress=False
        )

    return made, timed_in_turn(call, WAYS, [prompt] * rounds)


def comparison(made: dict[str, Generation], seconds: np.ndarray) -> str:
    """Lines about speed: each of `WAYS`, and the ratio with its interval over rounds."""
    per_token = seconds / [len(made[way].tokens[0]) for way in WAYS]
    lines = [
        f"{way:12} {1 / median:6.1f} tokens/s {made[way].record.tokens_per_step:6.2f} tokens/step"
        for way, median in zip(WAYS, np.median(per_token, axis=0), strict=True)
    ]
    same = "the same as" if made["plain"].tokens == made["speculative"].tokens else "by rounding not those of"
    ratio = ratio_of_medians(*per_token.T)
    return "\n".join([*lines, f"{ratio} times as fast as plain decoding; the tokens are {same} plain decoding"])


if __name__ == "__main__":
    print(ABOUT)
    run()
