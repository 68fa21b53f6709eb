"""llama.cpp's own HTTP server, from the wheel ``xllamacpp``: ``python llamacpp_server.py MODEL.gguf PORT``.

It runs in the environment of ``make test-llamacpp``, not in that of the tests.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main(model: str, port: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.port = model, port
    params.n_parallel, params.n_ctx = 4, 4 * 4096
    params.cpuparams.n_threads = 2
    params.use_jinja = params.endpoint_metrics = params.endpoint_props = params.endpoint_slots = True
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
