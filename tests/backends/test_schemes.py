"""The table of schemes: each line opens a backend, and what is made of the table is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import FORMS, SCHEMES
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


def test_each_line_opens_a_backend_of_its_form_and_refuses_what_it_does_not_know() -> None:
    for scheme in SCHEMES.values():
        url = scheme.form.replace("host:port", "host:1")
        backend, _ = open_backend(url, environ={}, sends=False)
        assert isinstance(backend, Backend), scheme
        assert url.startswith(f"{scheme.name}://") and backend.name.startswith(f"{scheme.name}://")
        with pytest.raises(SpecError, match="no_such_option"):
            open_backend(f"{url}?no_such_option=1", environ={}, sends=False)


def test_a_service_without_its_key_names_the_variable() -> None:
    for scheme in SCHEMES.values():
        if scheme.is_service:
            with pytest.raises(SpecError, match=scheme.key):
                open_backend(scheme.form, environ={})


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
    assert "<!-- backends -->" in (ROOT / "docs" / "backends.md").read_text()
