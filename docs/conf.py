"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import blockpipe

project = "Blockpipe"
author = "The Blockpipe authors"
version = release = blockpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
exclude_patterns = ["_build", "explanation/sweep/*"]  # tables that explanation/sweep.md includes
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes")]

# A sidebar with the groups of index.md on every page: with pydata_sphinx_theme, pages right below
# the root have none.
html_theme = "furo"
html_title = "Blockpipe"
html_show_sourcelink = False
# Those of furo leave what a diff adds uncoloured.
pygments_style, pygments_dark_style = "friendly", "monokai"
