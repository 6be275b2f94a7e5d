"""Sphinx settings; `make docs` builds the pages with warnings as errors."""

import re

project = "gradient-core"
author = "the gradient-core authors"
extensions = ["sphinx.ext.autodoc", "myst_parser"]
html_theme = "furo"
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
myst_heading_anchors = 3
exclude_patterns: list[str] = []

ARGUMENT = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): (.+)$")


def rst_inline(text):
    """`code` becomes a literal; outside of it nothing is markup."""
    words = re.split(r"(`+[^`]+`+)", text)
    words[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", word) for word in words[::2]]
    words[1::2] = [f"``{word.strip('`')}``" for word in words[1::2]]
    return "".join(words)


def plain_text_to_rst(app, what, name, obj, options, lines):
    """Docstrings are plain text: `code` in backticks, examples indented after a blank line, `name: meaning` lines."""
    result: list[str] = []
    in_code = in_argument = False
    for line in lines:
        indented = line.startswith("    ")
        after_blank = not result or not result[-1].strip()
        if in_code and (indented or not line.strip()):
            result.append(line)
            continue
        in_code = False
        if indented and after_blank and not in_argument:
            result += [".. code-block:: text" if "-->" in line else ".. code-block:: python", "", line]
            in_code = True
            continue
        text = rst_inline(line.strip())
        argument = ARGUMENT.match(text)
        if argument:
            if not in_argument and not after_blank:
                result.append("")
            result.append(f"- **{argument[1]}**: {argument[2]}")
            in_argument = True
        elif not text:
            result.append("")
            in_argument = False
        else:
            result.append(f"  {text}" if in_argument else text)
    lines[:] = result


def setup(app):
    app.connect("autodoc-process-docstring", plain_text_to_rst)
