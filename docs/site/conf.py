"""Settings of Sphinx for the documentation site. ``docs/site/build.py`` writes the pages that it reads."""

from pygments.lexers.data import YamlLexer
from sphinx.pycode import ModuleAnalyzer

from batch_agent.version import __version__

project = "Batch Agent"
author = "the authors of Batch Agent"
copyright = "the authors of Batch Agent. Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
nitpicky = False
suppress_warnings = ["myst.header"]  # a page may begin with a heading of the second level, as GitHub allows

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Script", "ScriptedReply", "JsonObject", "JsonValue")}
autodoc_mock_imports = ["ray", "redis"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "Batch Agent"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text = "$ "
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a8", "color-brand-content": "#5fd3a8"},
}

_analyze = ModuleAnalyzer.analyze


def analyze(self):
    """Leave out the overloads of a function, which are for type checkers: its own signature says the same once."""
    _analyze(self)
    self.overloads.clear()


ModuleAnalyzer.analyze = analyze
MOST_PARAMETERS = 20  # a longer signature names only the first ones: the options follow BatchSpec on the same page


def shorten_signature(app, what, name, obj, options, signature, returns):
    parameters = (signature or "").split(", ")
    if len(parameters) > MOST_PARAMETERS:
        return "(*, task, inputs, **options)", returns
    return None


def shorten_docstring(app, what, name, obj, options, lines):
    """Replace the list of all options by a link, and mark names of other pages as text."""
    start = next((place for place, line in enumerate(lines) if line.startswith("Options, as keywords")), None)
    if start is not None:
        lines[start:] = [":class:`All options <batch_agent.BatchSpec>` are keywords, or fields of a ``BatchSpec``.", ""]


def setup(app):
    app.add_lexer("jsonl", YamlLexer)  # which has comments, too
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", shorten_docstring)
