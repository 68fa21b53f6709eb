#!/bin/sh
# vLLM with LMCache: evicted contexts go to host memory, and to other servers' where LMCACHE_REMOTE_URL names a store.
# serve.sh MODEL [more arguments of vllm serve]. OFFLOAD_GIB=64 is the host memory. See README.md beside this file.
set -eu
model=$1
shift
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # servers that share contexts must hash them alike
export LMCACHE_LOCAL_CPU=True LMCACHE_MAX_LOCAL_CPU_SIZE="${OFFLOAD_GIB:-64}" LMCACHE_CHUNK_SIZE=256
exec ${VLLM:-vllm} serve "$model" --enable-prompt-tokens-details --scheduling-policy priority \
  --enable-auto-tool-choice --tool-call-parser "${TOOL_PARSER:-hermes}" \
  --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}' "$@"
