"""Sphinx settings; `make docs` builds the pages with warnings as errors."""

import inspect
import re

project = "gradient-core"
author = copyright = "the gradient-core authors"
html_title = "gradient-core"
extensions = ["sphinx.ext.autodoc", "myst_parser"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
myst_heading_anchors = 3
exclude_patterns: list[str] = []

# `name: meaning`, `name, name: meaning` or `*_suffix: meaning`, at the start of a sentence.
ARGUMENT = re.compile(r"(?:^|(?<=[.;] ))(\*?\w+(?:, \*?\w+)*): ")


def rst_inline(text):
    """`code` becomes a literal; outside of it nothing is markup."""
    words = re.split(r"(`+[^`]+`+)", text)
    words[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", word) for word in words[::2]]
    words[1::2] = [f"``{word.strip('`')}``" for word in words[1::2]]
    return "".join(words)


def paragraph_to_rst(text, arguments):
    """A paragraph as it is, or cut where it begins to explain an argument, one list item each."""

    def explains(found):
        return all(name in arguments or name.startswith("*") for name in found[1].split(", "))

    cuts = [found for found in ARGUMENT.finditer(text) if explains(found)]
    if not cuts:
        return [rst_inline(text), ""]
    ends = [found.start() for found in cuts[1:]] + [len(text)]
    items = [
        f"- **{rst_inline(found[1])}**: {rst_inline(text[found.end() : end].strip())}"
        for found, end in zip(cuts, ends, strict=True)
    ]
    before = text[: cuts[0].start()].strip()
    return [*([rst_inline(before), ""] if before else []), *items, ""]


def plain_text_to_rst(app, what, name, obj, options, lines):
    """Docstrings are plain text: `code` in backticks, examples indented after a blank line, arguments explained."""
    try:
        arguments = set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        arguments = set()
    result, paragraph, code = [], [], []

    def close():
        if paragraph:
            result.extend(paragraph_to_rst(re.sub(" +", " ", " ".join(paragraph)), arguments))
        if any(line.strip() for line in code):
            language = "python" if "=" in "".join(code) or "(" in "".join(code) else "text"
            result.extend([f".. code-block:: {language}", "", *code, ""])
        paragraph.clear()
        code.clear()

    for line in lines:
        if line.startswith("    ") and not paragraph:
            code.append(line)
        elif not line.strip():
            code.append("") if code else close()
        else:
            if code:
                close()
            paragraph.append(line.strip())
    close()
    lines[:] = result


def setup(app):
    app.connect("autodoc-process-docstring", plain_text_to_rst)
