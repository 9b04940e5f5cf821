"""`python -m specnb.paper`: makes `paper/paper.pdf`."""

from specnb.paper.build import main

main()
