"""Long runs whose tables are committed, training included. Not part of the installed package.

`python -m studies NAME` makes `data/results/NAME.csv`, or a table of the audit's studies; see
`studies.study`.
"""
