"""Implementations of known bugs, by where they are: in a step, or in the decoding loop.

    bug           what every known bug has: name, description, report, kind
    step          the bug suite of a step: the bugs that the audit's bets were designed with; parts
                  of wrong rules
    verification  more bugs of a step, by what is wrong
    loop          bugs that only a loop can have: end of sequence, uniforms, caches, positions

No bet of the audit was designed for a bug that is marked as held out, so it may judge the audit's
power. Do not aim a bet at such a bug without taking the mark away. `audit_studies.bugs.known_bugs` lists
them all; `audit_studies.power.step_deviation` enumerates a step with one.
"""
