"""Speculative decoding: an exact sampler, the laws behind it, and the checks that show it.

Rooms, from the ground up; each imports only from those before it:

    law, theory, lenience  probability of one token; closed forms. No models, no input or output
    corpus, randomness     text that every user has; uniforms, one stream per row and purpose
    verify, exact          acceptance rules as pure functions; their enumeration
    mutants                what implementations get wrong in a step, as data
    beam, exact_beam       beam search over a drafted tree, likewise; its enumeration
    cache, fast, models    the rooms that know transformers; the same models sooner
    dialled                models of any shape at a chosen acceptance
    draft, ngram, record   drafters; what a generation remembers
    request, decode        what may be asked of the loop; the loop
    tree, search           a model run over a tree; beam search with models
    museum                 every known bug in the real loop
    estimate, cost         what was measured: intervals, tests, time
    cells, suspects        the audit's view of a law; the laws that known bugs give
    pit, noise             the randomised transform; noise that is used twice
    evidence, witness      many bets, one wealth; how far from the target's law a sampler is
    bets, forced           all bets on a text; the laws a target gives to texts that exist
    numerics, report       a target against itself; what an audit found
    auditor                judges text by text, and can be stopped
    audit, joint           is a sampler lossless: any generator; small vocabularies by enumeration
    beam_cost              what speculative beam search gains
    acceptance, kinds      alpha along a text; what kind of token stands where in it
    recommend, race        which gamma to use here; our loop beside transformers'
    results, figures       verdicts and tables; one style for every picture
    checks, detection      how engines test themselves; how many tokens the audit needs
    wild                   transformers as installed, audited
    bench                  what is promised about time, measured
    lanes, card, train     what a reader sees of a text, of the trained pair, and how that was made
    cli, alarms            the command; how often the audit is wrong about an exact sampler
    reading, numbers       results looked up; every number that the paper names
    paper                  the paper, made of them
    notebooks              the notebooks executed in place
"""
