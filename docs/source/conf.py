"""Sphinx settings; `make docs` builds the pages with warnings as errors."""

import functools
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
import options as option_tables  # docs/options.py
from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from tests.unit_tests.core_compat import megatron_page

COMMAND = re.compile(r"(\$ )?(python|torchrun|pip|make|hf|git|srun|sbatch|\. )")
COLUMNS = re.compile(r"\S {3,}\S")  # a table that a program prints
WRAPPED = re.compile(r'<div class="highlight-(?:sh|bash|text) .*?</pre>', re.DOTALL)
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):")
ARGUMENTS = re.compile(r" {4}[\w*]+(, [\w*]+)*: ")
OPTION = re.compile(r"(?<![\w-])(--?[\w.-]+)")

project = "gradient-core"
author = copyright = "the gradient-core authors"
html_title = "gradient-core"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
napoleon_use_rtype = False
napoleon_use_ivar = True
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
myst_heading_anchors = 3
exclude_patterns: list[str] = []


class Picture(SphinxDirective):
    """Show `name_light.svg` on light pages and `name_dark.svg` on dark ones; the directive's content describes both."""

    required_arguments = 1
    has_content = True

    def run(self):
        path = Path(self.arguments[0])
        return [
            nodes.image(
                uri=f"{path.parent}/{path.stem}_{theme}{path.suffix}",
                alt=" ".join(self.content),
                classes=[f"only-{theme}"],
                width="100%",
            )
            for theme in ("light", "dark")
        ]


def rst_inline(text):
    """`code` becomes a literal; outside of it nothing is markup."""
    words = re.split(r"(`+[^`]+`+)", text)
    words[::2] = [
        re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", word) for word in words[::2]
    ]
    words[1::2] = [f"``{word.strip('`')}``" for word in words[1::2]]
    return "".join(words)


def option_table(cls):
    """The options of a class as a table."""
    lines = [
        ".. list-table::",
        "   :class: options",
        "   :header-rows: 1",
        "   :widths: 28 12 34 26",
        "",
    ]
    cells = [("option", "default", "what it does", "when to change it")]
    for row in option_tables.table_of(cls):
        default = f"``{row.default}``" if row.default != "required" else row.default
        cells.append(
            (f"``{row.shown}``", default, rst_inline(row.what), rst_inline(row.when))
        )
    for option, *rest in cells:
        lines += [f"   * - {option}", *(f"     - {cell}" for cell in rest)]
    return [*lines, ""]


def has_table(obj):
    return inspect.isclass(obj) and option_tables.path_of(obj) in option_tables.CLASSES


def plain_text_to_rst(app, what, name, obj, options, lines):
    """Docstrings are plain text: `code` in backticks, examples indented after a blank line, then sections.

    napoleon renders the sections. The arguments of a class that has a table are in the table.
    """
    tabled = what == "class" and has_table(obj)
    section, code, result = "", [], []

    def close():
        if any(line.strip() for line in code):
            is_python = "=" in "".join(code) or "(" in "".join(code)
            language = "python" if is_python else "text"
            result.extend([f".. code-block:: {language}", "", *code, ""])
        code.clear()

    for line in lines:
        if SECTION.fullmatch(line):
            section = line
        elif line.strip() and not line.startswith(" "):
            section = ""
        if section:
            close()
            if not (tabled and section in ("Args:", "Attributes:")):
                head = ARGUMENTS.match(line)
                names = head[0] if head else ""
                result.append(names + rst_inline(line[len(names) :]))
        elif line.startswith("    ") and not (result and result[-1].strip()):
            code.append(line)
        elif not line.strip():
            (code if code else result).append("")
        else:
            close()
            result.append(rst_inline(line))
    close()
    lines[:] = [*result, "", *(option_table(obj) if tabled else [])]


def short_signature(app, what, name, obj, options, signature, returns):
    """The arguments of a class that has a table are in the table."""
    return ("(...)", returns) if what == "class" and has_table(obj) else None


def without_fields(app, what, name, obj, skip, options):
    """Fields are explained by their class; its members are methods and properties."""
    is_method = (
        inspect.isroutine(obj)
        or inspect.isclass(obj)
        or isinstance(obj, (property, functools.cached_property))
    )
    return True if what == "class" and not is_method else None


def add_megatrons_fields(app, page, source):
    """Fill in the tables of Megatron's fields, which the code decides."""
    if page == "api/megatron_fields":
        source[0] = source[0].replace(megatron_page.MARK, megatron_page.table())


def commands_wrap(app, doctree):
    """Command lines are text, which a narrow page wraps; what has columns is `none`, and scrolled."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext()
        if block.get("language") in ("none", "default", "text"):
            if COLUMNS.search(text):
                block["language"] = "none"
            elif COMMAND.match(text):
                block["language"] = "text"


def options_stay_whole(app, page, template, context, doctree):
    """No line of a wrapped command ends behind the hyphen of `--option`."""
    context["body"] = WRAPPED.sub(
        lambda block: OPTION.sub(r'<span class="option">\1</span>', block[0]),
        context.get("body", ""),
    )


def setup(app):
    app.add_directive("picture", Picture)
    app.connect("source-read", add_megatrons_fields)
    app.connect("doctree-read", commands_wrap)
    app.connect("html-page-context", options_stay_whole)
    app.connect("autodoc-skip-member", without_fields)
    app.connect(
        "autodoc-process-docstring", plain_text_to_rst, priority=400
    )  # before napoleon
    app.connect("autodoc-process-signature", short_signature)
