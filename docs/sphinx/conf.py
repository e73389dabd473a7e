# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Settings of `make docs`: pages in Markdown, C's reference from the headers by Doxygen and Breathe,
Python's from the package's docstrings."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]

project = "Quern"
author = "The Quern authors"
copyright = author
PROJECT = (ROOT / "CMakeLists.txt").read_text().split("project(")[1]
version = release = re.search(r"VERSION ([\d.]+)", PROJECT)[1]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
exclude_patterns = ["sphinx"]
root_doc = "index"
html_theme = "alabaster"
html_theme_options = {
    "description": "Kernels for long-context language models",
    "page_width": "1240px",
    "body_max_width": "1000px",
    "code_font_size": "0.75em",
}
breathe_projects = {"quern": str(ROOT / "build" / "docs" / "xml")}
breathe_default_project = "quern"
breathe_domain_by_extension = {"h": "c"}
breathe_show_include = False
primary_domain = "c"
highlight_language = "none"
# Links to files that are no page, as headers and examples: tests/docs.sh checks that they exist.
suppress_warnings = ["ref.myst"]
myst_heading_anchors = 3
c_id_attributes = ["QUERN_API"]
# The package is read as it stands here, not built: what comes from the C library or a framework is a stand-in.
sys.path.insert(0, str(ROOT / "python"))
autodoc_mock_imports = ["torch", "transformers", "tvm_ffi", "numpy"]
autodoc_mock_imports += ["quern._operations", "quern._faces"]
autodoc_preserve_defaults = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text: stars, bars and underscores at a word's end stand for themselves."""
    lines[:] = [re.sub(r"([*|]|_\b)", r"\\\1", line) for line in lines]


def setup(app):
    """Sphinx calls this once."""
    app.connect("autodoc-process-docstring", plain)
