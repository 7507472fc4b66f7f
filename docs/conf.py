"""Sphinx builds the site from Markdown (MyST): `make docs`. Warnings are errors, and nothing is fetched."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "distill-run"
author = "The distill-run authors"
project_copyright = "2026, the distill-run authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "architecture", "configuration_reference"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "distill-run"
html_show_sphinx = False
