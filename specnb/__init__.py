"""Speculative decoding: an exact sampler, the distributions behind it, and the checks that show it.

Rooms, from the ground up; each imports only from those before it:

    distribution, theory, lenience  probability of one token; closed forms. No models, no input or output
    corpus, randomness     text that every user has; uniforms, one stream per row and purpose
    checkpoints            the folder that a model is loaded from: its formats, checksums and completeness
    verify, exact, cuts    acceptance rules as pure functions; their enumeration; rows that neighbours cut short
    beam, exact_beam       beam search over a drafted tree, likewise; its enumeration
    machine, layout        the machine's name; which layout of a weight is faster on it
    cache, fast, double, models    the rooms that know transformers; the same models sooner
    shapes, synthetic        sizes that others published; models of any shape at a chosen acceptance
    draft, ngram, record   drafters; what a generation remembers
    request, memory        what may be asked of the loop; the bytes that it takes
    step, seats, decode    one step of a batch; who takes part in it; the loop
    ragged, ragged_check   three ways to go on after unequal acceptance; what they must not get wrong
    watch                  what a device would notice: waits, allocations, shapes
    tree, search           a model run over a tree; beam search with models
    estimate, cost, speed  what was measured: intervals, tests, what runs and what generations cost
    floor                  the time that memory traffic alone needs
    beam_cost              what speculative beam search gains
    acceptance, kinds      alpha along a text; what kind of token stands where in it
    recommend, race        which gamma to use here; our loop beside transformers'
    source_digest          which modules some code imports, and a digest of each
    origin                 what results were made of, and whether they are stale
    results, figures       verdicts and tables; one style for every picture
    audit                  is a sampler lossless: a package of its own, with its own rooms
    bench                  what is promised about time, measured: a package of its own
    ragged_view            pictures of caches and masks
    lanes, card, train     what a reader sees of a text, of the trained pair, and how that was made
    cli                    the command
    paper                  the paper, made of the results: a package of its own
    notebooks              the notebooks executed in place
    reproduce              the steps of the pipeline: a notebook runs if its results are not up to date
"""
