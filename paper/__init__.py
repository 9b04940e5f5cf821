"""The paper, built from the results and from nothing else: `make paper`.

Modules, each importing only from those before it:

    reading           look up results
    numbers, remarks  every number of the paper; a check for every statement without a number
    build             make tables and the PDF
"""
