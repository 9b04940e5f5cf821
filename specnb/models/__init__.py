"""Everything that knows transformers: loading, caches, forward passes, weight layouts, random
models."""
