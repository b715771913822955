"""How the documentation is built (`make docs`). Nothing is fetched, now or by a browser."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

import notebook  # noqa: E402

from doge_fast import __version__  # noqa: E402

project = "doge_fast"
author = "the doge_fast authors"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    # Ours, in docs/_extensions.
    "docstrings",
    "mathml",
    "command_line",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "substitution"]
myst_substitutions = {"on_colab": notebook.on_colab(notebook.address())}
myst_heading_anchors = 3

html_theme = "furo"
html_title = "doge_fast"
html_static_path = ["_static"]
html_css_files = ["doge_fast.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

# `name` in a docstring is code.
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nitpicky = True
# Types of other packages: their inventories would have to be fetched.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|transformers|datasets|numpy|np|npt|accelerate|collections|pathlib|argparse|os"
        r"|typing|jinja2|matplotlib|pyarrow|pa|yaml|tokenizers|nn|abc|types)(\..*)?",
    ),
    # Names under which sources import what stands elsewhere, and type aliases.
    (r"py:(class|obj|data)", r".*"),
]
