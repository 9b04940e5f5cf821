"""Is `gamma="auto"` slower than plain decoding on any kind of text? It and two fixed lengths, in turn, as `workloads`.

Each prompt is answered twice by each way, with the same tokens; the mean of both times counts.
"""

from dataclasses import replace
from functools import partial

from studies.real import workloads

WAYS = ("plain", "gamma 2", "gamma 5", "auto")

STUDY = replace(workloads.STUDY, rows=partial(workloads.measure, only=WAYS, repeats=2))
