"""The decoding loop: one batched step, the choice of gamma, the scheduler of rows, and the record
of a generation."""
