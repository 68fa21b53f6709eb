"""Webhooks: notices of batches that have ended, signed as OpenAI signs them."""

from __future__ import annotations

import base64
import secrets


def new_secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
