"""Sphinx's settings for the book, and what turns the docstrings of this project into its markup;
see book.py."""

import inspect
import re

project = "specnb"
author = "The specnb authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
root_doc = "README"
exclude_patterns = ["download/**", "_static/**"]

html_theme = "furo"
html_title = "specnb"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["claims.js", "widgets.js"]
html_copy_source = False
# From file:// a browser may not fetch the pages that excerpts come from.
html_show_search_summary = False
html_theme_options = {"top_of_page_buttons": [], "light_css_variables": {"font-stack--monospace": "monospace"}}
mathjax_path = "mathjax/tex-svg.js"

nb_execution_mode = "off"
nb_number_source_lines = False
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
# A name that several modules have is linked to one of them; of callable values autodoc shows no
# signature.
suppress_warnings = ["ref.python", "autodoc"]
# Only what this project defines can be linked to; intersphinx would need a network.
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!specnb|studies|notebooks).*"), ("py:.*", r".*\._\w+")]


def block_as_rst(block):
    """One paragraph of a docstring: examples stay, aligned columns are literal, the rest is text
    with `code`."""
    lines = block.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return block
    listed = lines[0].startswith("- ") and all(line.startswith(("- ", "  ")) for line in lines)
    if not listed and any(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in lines):
        return "::\n\n" + "\n".join("   " + line for line in lines)
    text = re.split(r"`([^`]+)`", block)
    text[::2] = [re.sub(r"([\\*_|`])", r"\\\1", part) for part in text[::2]]
    text[1::2] = [rf"\ ``{part}``\ " for part in text[1::2]]
    return "".join(text)


def docstring_as_rst(app, what, name, obj, options, lines):
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = [*"\n\n".join(block_as_rst(block) for block in blocks if block).splitlines(), ""]


def signature_as_written(app, what, name, obj, options, args, returns):
    """With the annotations of the source, not with what they are aliases of."""
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    given = list(signature.parameters.values())
    bound = what == "method" and given and given[0].name in ("self", "cls")
    text = str(signature.replace(parameters=given[bound:]))
    text = re.sub(r"(: |-> )'((?:[^'\\]|\\.)*)'", r"\1\2", text)
    args, _, returns = text.partition(") -> ")
    return (args + ")" if returns else args), (returns or None)


def setup(app):
    app.connect("autodoc-process-docstring", docstring_as_rst)
    app.connect("autodoc-process-signature", signature_as_written)
