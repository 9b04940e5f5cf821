"""Models of transformers: loading, caches, forward passes, weight layouts, random
models."""
