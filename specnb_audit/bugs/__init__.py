"""Implementations of known bugs, by where they are: in a step, in the decoding loop, in the layout of a batch.

    bug             what every known bug has: name, description, report, kind
    step            the bug suite of a step: the bugs that the audit's bets were designed with
    acceptance      more bugs of a step, by what is wrong: how many draft tokens are accepted
    replacement     the recovered or bonus token
    uniforms        uniforms, and how they become tokens
    distributions   temperature, rounding and normalisation of p or q
    filters         filters, penalties, biases, and ids of another vocabulary
    parts           parts of verification rules that rules with a bug share
    step_deviation  how far the distribution of a step with a bug is from the target's, by enumeration
    loop            bugs that only a loop can have: end of sequence, uniforms, caches, positions
    layout          bugs of the batch layouts of `studies.batching.batch_layouts`

No bet of the audit was designed for a bug that is marked as held out, so it may judge the audit's power. Do not aim a
bet at such a bug without taking the mark away. `specnb_audit.known_bugs` lists them all.
"""
