"""Packages that only some formats need, imported when one of those is met."""

from __future__ import annotations

import importlib
from types import ModuleType

from batch_agent.errors import SpecError


def extra(module: str, purpose: str) -> ModuleType:
    """A module of a package that need not be installed. SpecError says what to install."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise SpecError(f"{purpose} needs the package {package}; install it with: pip install {package}") from None
