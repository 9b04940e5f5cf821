"""Sphinx's settings for the book, `make book`; what it does beside Sphinx is in book.py."""

import csv
from pathlib import Path

project = "specnb"
author = "The specnb authors"
extensions = [
    "numpydoc", "docs.book", "myst_nb", "sphinx.ext.apidoc", "sphinx.ext.viewcode", "sphinx-mathjax-offline",
    "sphinx_reredirects",
]  # fmt: skip
root_doc = "docs/contents"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "notebooks/*", "data/*/README.md",
    "audit/README.md", "audit/docs/*.md", "audit/notebooks/*", "audit/data/findings/*.md", "build/api/*/*",
]  # fmt: skip
exclude_patterns = ["docs/package.md", "**.ipynb_checkpoints"]

html_theme = "furo"
html_title = "specnb"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["claims.js", "widgets.js"]
html_copy_source = False
# From file:// a browser may not fetch the pages that excerpts come from.
html_show_search_summary = False
html_theme_options = {"top_of_page_buttons": [], "light_css_variables": {"font-stack--monospace": "monospace"}}

nb_execution_mode = "off"
nb_number_source_lines = False
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4

apidoc_modules = [
    {"path": "../specnb", "destination": "build/api/specnb", "separate_modules": True},
    {"path": "../audit/specnb_audit", "destination": "build/api/specnb_audit", "separate_modules": True},
]
apidoc_automodule_options = {"members", "undoc-members"}
autodoc_default_options = {"member-order": "bysource"}
default_role = "code"
numpydoc_show_class_members = False
# A name that several modules have is linked to one of them; of callable values autodoc shows no signature.
suppress_warnings = ["ref.python", "autodoc"]
# Only what this project defines can be linked to; intersphinx would need a network.
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(?!specnb).*"),
    ("py:.*", r".*\.(_\w+|T|Module|Result)"),
]

with (Path(__file__).parent / "moved.csv").open(encoding="utf-8") as moved:
    redirects = {"index": "README.html"} | {old: f"../{new}.html" for old, new in list(csv.reader(moved))[1:]}
