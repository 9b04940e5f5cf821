"""`python -m paper`: makes `paper/paper.pdf`."""

from paper.build import main

main()
