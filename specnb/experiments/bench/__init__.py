"""Measure the promised speeds: `make bench` on the processor, `make bench-gpu` on a GPU at published sizes.

`tables` keeps the tables of measurements and says which rows a new measurement replaces. `against_transformers`
compares our loop with the assisted generation of transformers. `setting` measures one pair of models at one setting,
`plan` lists what is measured on a GPU, and `cpu` and `gpu` are the two commands.
"""
