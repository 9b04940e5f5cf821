"""`python -m specnb.bench`: the goals on this machine's processor."""

from specnb.bench.host import main

main()
