#!/bin/bash
# vLLM with LMCache's server: evicted contexts go to host memory, and to a store that several hosts share.
# serve.sh MODEL [more arguments of vllm serve]. See README.md beside this file.
#   OFFLOAD_GIB=64     host memory for contexts
#   LMCACHE_L2=JSON    a store behind it, e.g. {"type": "resp", "host": "STORE", "port": 6379} for Redis
# Ends with both when one of them ends.
set -eu
model=$1
shift
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # servers that share contexts must hash them alike
port=${LMCACHE_PORT:-5555}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' INT TERM
${LMCACHE:-lmcache} server --host 127.0.0.1 --port "$port" --l1-size-gb "${OFFLOAD_GIB:-64}" --eviction-policy LRU \
  ${LMCACHE_L2:+--l2-adapter "$LMCACHE_L2"} &
${VLLM:-vllm} serve "$model" --enable-prompt-tokens-details --scheduling-policy priority \
  --enable-auto-tool-choice --tool-call-parser "${TOOL_PARSER:-hermes}" \
  --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config":
    {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": '"$port"'}}' "$@" &
wait -n
