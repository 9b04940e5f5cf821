"""Long runs whose tables are committed: benchmarks, the bug suite, training. Not part of the installed package."""
