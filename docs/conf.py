"""Sphinx configuration: `python3 -m sphinx -W docs build/docs/html`. Needs the extra `docs`, no network, no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
for folder in (REPOSITORY, REPOSITORY / "ptxsim", DOCS / "_ext"):
    sys.path.insert(0, str(folder))
# The tutorials run in processes of their own, without a GPU and without compilers in the background.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
os.environ["MLA_CUPY_BACKEND"] = "numpy"
os.environ["MLA_CUPY_JIT"] = "lazy"

from mla_cupy import __version__  # noqa: E402

project = "mla_cupy"
author = "the mla_cupy developers"
project_copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_design",
    "repository_pages",
    "kernel_tables",
    "bench_results",
    "command_help",
    "plain_pages",
]
exclude_patterns = ["_ext", "_templates"]
templates_path = ["_templates"]
autosummary_generate = True
default_role = "literal"  # of `names` in docstrings
toc_object_entries_show_parents = "hide"
smartquotes = False  # quotes and dashes in docstrings are those of code
highlight_language = "none"
nitpicky = True
needs_sphinx = "8.1"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_typehints = "none"
# The pages of the bindings need only their docstrings, which are the same whatever is installed.
autodoc_mock_imports = ["torch", "transformers", "jax", "vllm", "sglang"]
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "pydata_sphinx_theme"
html_title = f"mla_cupy {release}"
html_static_path = ["_static"]
html_css_files = ["mla.css"]
html_js_files = ["code.js"]
html_favicon = "_static/favicon.svg"
html_sourcelink_suffix = ""
html_theme_options = {
    "logo": {"text": f"mla_cupy {release}"},
    "header_links_before_dropdown": 7,
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc", "sourcelink"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {
    page: []
    for page in (
        "index",
        "install",
        "quickstart",
        "which-function",
        "coming-from",
        "conventions",
        "benchmarks",
        "changelog",
    )
}

# `python3 -m sphinx -b linkcheck docs build/docs/links` follows the links to other sites.
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors = False
