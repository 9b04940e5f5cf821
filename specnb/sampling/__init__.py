"""Sampling as pure functions of tensors: distributions, verification rules, and their exact enumeration.

Nothing here knows of models, caches or devices.

distributions     from logits to probabilities; overlap, total variation, residual, sampling
verification      acceptance rules: which draft tokens are kept, and which token follows them
lenience          closed forms for the lenient rule (appendix A.5)
enumeration       the exact distribution of everything that one step of a rule emits
randomness        one independent stream of uniforms per row and purpose
batch_truncation  rules whose number of kept tokens also depends on the other rows of a batch
beam_rules        beam search and its speculative version (appendix A.4)
beam_enumeration  the same over every possible draft tree
"""
