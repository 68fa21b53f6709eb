"""The table of schemes: each line opens a backend, and what is made of the table is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import FORMS, SCHEMES, Scheme
from batch_agent.errors import SpecError

ROOT = Path(__file__).parents[2]


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def beside_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("host 8000\n")


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_each_line_opens_a_backend_of_its_form(scheme: Scheme) -> None:
    assert callable(resolve_name(scheme.factory))
    assert scheme.form.startswith(f"{scheme.name}://")
    url = scheme.form.replace("host:port", "host:1")
    backend, _ = open_backend(url, environ={}, sends=False)
    assert isinstance(backend, Backend)
    assert backend.name.startswith(f"{scheme.name}://")


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_an_option_that_a_line_does_not_have_is_refused(scheme: Scheme) -> None:
    url = scheme.form.replace("host:port", "host:1") + "?no_such_option=1"
    with pytest.raises(SpecError, match="no_such_option"):
        open_backend(url, model=None, api_key=None, environ={}, sends=False)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES.values() if s.is_service], ids=lambda scheme: scheme.name)
def test_a_service_without_its_key_names_the_variable(scheme: Scheme) -> None:
    with pytest.raises(SpecError, match=scheme.key):
        open_backend(scheme.form, model=None, api_key=None, environ={})


def test_messages_name_the_forms_of_the_table() -> None:
    assert all((scheme.form in FORMS) is scheme.listed for scheme in SCHEMES.values())
    with pytest.raises(SpecError) as caught:
        open_backend("localhost:8000", model=None, api_key=None, environ={})
    assert FORMS in str(caught.value)
    with pytest.raises(SpecError, match=f"Known: {', '.join(SCHEMES)}"):
        open_backend("gopher://host", model=None, api_key=None, environ={})


def test_the_tables_of_the_documentation_are_up_to_date() -> None:
    made = tables()
    for page in made.PAGES:
        assert page.read_text() == made.filled(page.read_text()), f"python docs/tables.py writes {page.name}"
    assert made.BEGIN in (ROOT / "docs" / "backends.md").read_text()
