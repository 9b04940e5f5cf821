"""Speculative decoding: an exact sampler, the laws behind it, and the checks that show it.

Rooms, from the ground up; each imports only from those before it:

    law, theory            probability of one token; closed forms. No models, no input or output
    corpus, randomness     text that every user has; uniforms, one stream per row and purpose
    verify, exact          acceptance rules as pure functions; their enumeration
    cache, models          the rooms that know transformers
    draft, ngram, record   drafters; what a generation remembers
    decode                 the loop
    estimate, cost         what was measured: intervals, tests, time
    results, figures       verdicts and tables; one style for every picture
    lanes, card, train     what a reader sees of a text, of the trained pair, and how that was made
    notebooks              the notebooks executed in place
"""
