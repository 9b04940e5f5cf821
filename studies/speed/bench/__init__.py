"""The bench: speeds and costs on a CPU (`make bench`) and on a GPU (`make bench-gpu`).

tables                 columns, goals, and which rows a new measurement replaces
generators             this package and transformers as functions of a prompt, and their interleaved timing
setting                one pair at one setting: predicted, measured, memory bound, memory
against_transformers   this package's loop and that of transformers on the same prompts
stages                 everything that is measured on a CPU
plan, published_sizes  the tasks on a GPU, and running them
"""
