"""Certificates for servers of tests, made by the openssl program."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """What a server on localhost needs, and the file that a client must trust."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the openssl program")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate
