"""Sphinx settings; `make docs` builds the pages with warnings as errors."""

project = "gradient-core"
author = "the gradient-core authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
html_theme = "furo"
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
autodoc_typehints = "signature"
autodoc_mock_imports: list[str] = []
suppress_warnings = ["myst.xref_missing"]
exclude_patterns: list[str] = []
