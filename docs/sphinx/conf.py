# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Settings of `make docs`: pages in Markdown, C's reference from the headers by Doxygen and Breathe."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]

project = "Quern"
author = "The Quern authors"
copyright = author
PROJECT = (ROOT / "CMakeLists.txt").read_text().split("project(")[1]
version = release = re.search(r"VERSION ([\d.]+)", PROJECT)[1]
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
# Links to files that are no page, as headers and examples: tests/docs.sh checks that they exist.
suppress_warnings = ["ref.myst"]
myst_heading_anchors = 3
c_id_attributes = ["QUERN_API"]
