"""Calls of `generate` whose settings are one flat dictionary, those of its study among them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specnb.decoding.generate import Generation, Study, generate

OF_STUDY = {field.name for field in fields(Study)}


def generate_with(**asked: Any) -> Generation:
    """`generate` with these settings; the fields of `Study` go into a study."""
    of_study = {name: asked.pop(name) for name in OF_STUDY & asked.keys()}
    return generate(**({"study": Study(**of_study)} | asked))
