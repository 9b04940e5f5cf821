"""Collects token ids from any Python engine for `specnb-audit audit`, with logits, which are
compared first.

    python any_engine.py prompts TEXT prompts.jsonl TARGET    # with a Python that has transformers
    python any_engine.py collect prompts.jsonl plain.jsonl    # with the engine's Python
    python any_engine.py collect prompts.jsonl tokens.jsonl speculate
    python any_engine.py compare tokens.jsonl TARGET          # with a Python that has transformers

Replace `engine`; here it is transformers with the pair that ships. `collect` itself needs nothing
but Python. See any-engine.md.
"""

import json
import sys
from pathlib import Path

NEW_TOKENS = 64  # of each completion
COMPARED = 8  # prompts whose logits are written
LIMIT = 1e-3  # in total variation; float32 differs by 1e-5, and bfloat16 by some 1e-2


def engine():
    """Two functions of the engine: logits after a prompt, and the tokens sampled after it."""
    import torch
    from transformers import AutoModelForCausalLM

    target, draft = (
        AutoModelForCausalLM.from_pretrained(f"data/pair/{name}", dtype=torch.float32) for name in ("target", "draft")
    )
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}

    def logits(prompt):
        """A number for each token of the vocabulary: the target's logits, before temperature and
        filters."""
        return target(torch.tensor([prompt])).logits[0, -1].tolist()

    def tokens(prompt, seed, speculate):
        """The ids of the new tokens, all of them, without the prompt."""
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        arguments = settings | ({"assistant_model": draft} if speculate else {})
        made = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **arguments)
        return made[0, ids.shape[1] :].tolist()

    return logits, tokens


def prompts(text, out, target, count=256, length=24):
    """Writes `count` prompts to `out`: each begins at another place of the file `text`.

    The begin-of-text token comes first, where the tokenizer has one; not every tokenizer adds it by
    itself.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    words, count, length = Path(text).read_text(encoding="utf-8"), int(count), int(length)
    with open(out, "w") as made:
        for number in range(count):
            ids = tokenizer.encode(words[number * len(words) // count :][: 20 * length], add_special_tokens=False)
            first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            made.write(json.dumps([*first, *ids][:length]) + "\n")


def collect(prompts, out, speculate=""):
    """Writes a line for each prompt of `prompts`, a list of token ids a line, to `out`."""
    logits, tokens = engine()
    with open(prompts) as given, open(out, "w") as made:
        for number, line in enumerate(given):
            # No seed occurs twice, within a file or across both.
            prompt, seed = json.loads(line), 2 * number + bool(speculate)
            entry = {"prompt": prompt, "tokens": tokens(prompt, seed, bool(speculate)), "seed": seed}
            if number < COMPARED:
                entry["logits"] = logits(prompt)
            made.write(json.dumps(entry) + "\n")


def compare(tokens, target, limit=LIMIT):
    """Compares the logits in a file with those of the model `target`; exits with status 1 if they
    differ."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    apart = []
    with open(tokens) as lines:
        for entry in map(json.loads, lines):
            if "logits" in entry:
                with torch.inference_mode():
                    p = model(torch.tensor([entry["prompt"]])).logits[0, -1].softmax(-1)
                q = torch.tensor(entry["logits"]).softmax(-1)
                if len(p) != len(q):
                    sys.exit(f"the engine has {len(q)} logits, the target {len(p)}: cut off what pads the vocabulary")
                apart.append(float((p - q).abs().sum() / 2))
    if not apart:
        sys.exit(f"{tokens} has no logits to compare")
    print(f"logits after {len(apart)} prompts: total variation at most {max(apart):.2g}, limit {float(limit):g}")
    if not max(apart) <= float(limit):
        sys.exit("the engine's model is not the target: another checkpoint, conversion, dtype or prompt")


if __name__ == "__main__":
    {"prompts": prompts, "collect": collect, "compare": compare}[sys.argv[1]](*sys.argv[2:])
