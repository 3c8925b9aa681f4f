"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import blockpipe

project = "Blockpipe"
author = "The Blockpipe authors"
version = release = blockpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "explanation/sweep/*"]  # tables that explanation/sweep.md includes
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes")]

html_theme = "pydata_sphinx_theme"
html_title = "Blockpipe"
html_theme_options = {"show_nav_level": 2, "navigation_with_keys": False}
html_show_sourcelink = False
