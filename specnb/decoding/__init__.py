"""The decoding loop: one batched step, the scheduler of its rows, the record of a generation, and beam search."""
