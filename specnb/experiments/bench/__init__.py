"""What is promised about time, measured: `make bench` here, `make bench-gpu` on a GPU.

Rooms, from the ground up; each imports only from those before it:

    ledger     what is written down about time, and whose rows a measurement replaces
    peers      our loop beside transformers', on this machine's processor
    host       all that is measured there: that, walltime, regimes, curves
    cell       one pair at one setting: predicted, measured, its floor, its memory
    plan, gpu  the same on a GPU at published sizes, and Table 2 once more: what to do, and doing it
"""
