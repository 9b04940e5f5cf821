"""The acceptance functions of released engines, with their output distribution computed and not
sampled."""
