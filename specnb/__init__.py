"""Speculative decoding: an exact sampler, the laws behind it, and the checks that show it.

Rooms, from the ground up; each imports only from those before it:

    law, theory, lenience  probability of one token; closed forms. No models, no input or output
    corpus, randomness     text that every user has; uniforms, one stream per row and purpose
    verify, exact          acceptance rules as pure functions; their enumeration
    beam, exact_beam       beam search over a drafted tree, likewise; its enumeration
    cache, fast, models    the rooms that know transformers; the same models sooner
    dialled                models of any shape at a chosen acceptance
    draft, ngram, record   drafters; what a generation remembers
    request, step, decode  what may be asked of the loop; one step of a batch; the loop
    tree, search           a model run over a tree; beam search with models
    estimate, cost         what was measured: intervals, tests, time
    beam_cost              what speculative beam search gains
    acceptance, kinds      alpha along a text; what kind of token stands where in it
    recommend, race        which gamma to use here; our loop beside transformers'
    results, figures       verdicts and tables; one style for every picture
    audit                  is a sampler lossless: a package of its own, with its own rooms
    bench                  what is promised about time, measured
    lanes, card, train     what a reader sees of a text, of the trained pair, and how that was made
    cli                    the command
    reading, numbers       results looked up; every number that the paper names
    paper                  the paper, made of them
    notebooks              the notebooks executed in place
"""
