"""Optional packages that only some formats need, imported at their first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from batch_agent.errors import SpecError


def extra(module: str, purpose: str) -> ModuleType:
    """Return a module of an optional package. Raises SpecError, which says what to install."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise SpecError(f"{purpose} needs the package {package}; install it with: pip install {package}") from None
