"""A KV connector for vLLM that moves nothing, and remembers where the KV of each finished request is.

For ``benchmarks/diff_kv.py``, in an engine of one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``). Everything here is
vLLM's interface; this package does not use it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

CACHES: dict[str, torch.Tensor] = {}  # of each layer, as the worker registered them
FINISHED: list[list[int]] = []  # the blocks of each request, in the order of their ends


class ReadingConnector(KVConnectorBase_V1, SupportsHMA):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        CACHES.update(kv_caches)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        FINISHED.append(list(block_ids[0]))
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return
