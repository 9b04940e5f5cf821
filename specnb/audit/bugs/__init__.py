"""Implementations of known bugs, by where they are: in a step, in the decoding loop, in the layout of a batch.

    bug             what every known bug has: name, description, report, kind
    step            bugs of one step: each changes the rule, the distributions it reads, or how draft tokens are sampled
    step_deviation  how far the distribution of a step with a bug is from the target's, by enumeration
    loop            bugs that only a loop can have: end of sequence, uniforms, caches, positions
    later           more bugs of a step; no bet of the audit was designed for most of them, so they judge its power
    latest          filters that nobody claimed, biased tokens, the last token of a step; half of them held out
    layout          bugs of the batch layouts of `specnb.decoding.batch_layouts`

`specnb.audit.known_bugs` lists them all.
"""
