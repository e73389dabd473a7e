# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Sphinx's settings: pages in Markdown, the C reference from the headers by Doxygen and Breathe. See `make docs`."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]

project = "Quern"
author = "The Quern authors"
copyright = author
version = release = re.search(r"VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text().split("project(")[1])[1]
extensions = ["myst_parser", "breathe"]
exclude_patterns = ["sphinx"]
root_doc = "index"
html_theme = "alabaster"
html_theme_options = {"description": "Kernels for long-context language models", "page_width": "1100px"}
breathe_projects = {"quern": str(ROOT / "build" / "docs" / "xml")}
breathe_default_project = "quern"
breathe_domain_by_extension = {"h": "c"}
breathe_show_include = False
primary_domain = "c"
highlight_language = "none"
# Links to files of the repository that are no page (headers, sources, examples); tests/docs.sh looks whether they exist.
suppress_warnings = ["ref.myst"]
myst_heading_anchors = 3
c_id_attributes = ["QUERN_API"]
