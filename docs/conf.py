"""How Sphinx builds the site: `make docs`, then open docs/_build/html/index.html.

The environment variable SITE says where the site is published, such as https://host/docs/. It is
needed by the switch between versions; by default that is the root of any server, such as
`python -m http.server --directory docs/_build/html`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from reference import as_restructured_text, write_reference
from versions import write_versions

import shardmesh as sm

HERE = Path(__file__).parent
SITE = os.environ.get("SITE", "/").rstrip("/") + "/"

project = "shardmesh"
author = "the authors of shardmesh"
copyright = "the authors of shardmesh, Apache-2.0"
version = release = sm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "code"
suppress_warnings = ["ref.python"]  # attributes of several classes have one name

# Pages are written for GitHub as well: links name files, and headings are linked by GitHub's rule.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_docstring_signature = False  # they open with a call as a user writes it
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Communication", "returns_style")]

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "shardmesh"
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
    "switcher": {"json_url": f"{SITE}_static/switcher.json", "version_match": version},
    "check_switcher": False,  # which looks for the file before it is published
    "show_version_warning_banner": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _docstring(app, what, name, value, options, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def _without_links_to_folders(app, page: str, source: list[str]) -> None:
    """Show links to folders and to pages that are not part of the site as text.

    Readers of the repository can follow them.
    """
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([\w/.-]*)\)", _link_or_text, source[0])


def _link_or_text(match: re.Match[str]) -> str:
    path = HERE.parent / match[2]
    return match[1] if path.is_dir() or path.suffix == ".md" else match[0]


def setup(app) -> None:
    write_reference(HERE / "api")
    write_versions(HERE / "_static", version, SITE)
    app.connect("autodoc-process-docstring", _docstring, priority=100)
    app.connect("source-read", _without_links_to_folders)
