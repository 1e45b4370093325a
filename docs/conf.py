"""Sphinx: MyST pages, the API from docstrings, and reference pages made from the code itself."""

from __future__ import annotations

import sys
from pathlib import Path

import shoal

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Shoal"
author = "the Shoal authors"
copyright = "the Shoal authors"
version = release = shoal.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "generated"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext"]

# The page is the same where they are not installed.
autodoc_mock_imports = ["keras", "tensorflow"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_type_aliases = {"NDArray": "NDArray"}

html_theme = "furo"
html_title = f"Shoal {version}"
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
