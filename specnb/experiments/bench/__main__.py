"""`python -m specnb.experiments.bench`: the goals on this machine's processor."""

from specnb.experiments.bench.cpu import main

main()
