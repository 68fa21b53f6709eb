#!/bin/sh
# SGLang for agents: serve.sh MODEL [more arguments of sglang.launch_server]. See README.md beside this file.
#   SGLANG="python -m sglang.launch_server"   the command
#   TOOL_PARSER=qwen25   how the model writes tool calls; "" where agents have no tools
#   OFFLOAD_RATIO=2      host memory for evicted contexts, in sizes of the GPU's KV cache
#   SHARED=1             other clients use the server too: agents' contexts are evicted after theirs
set -eu
model=$1
shift
set -- --model-path "$model" --port 30000 --enable-cache-report --enable-metrics --enable-priority-scheduling "$@"
if [ -n "${TOOL_PARSER-qwen25}" ]; then
  set -- "$@" --tool-call-parser "${TOOL_PARSER-qwen25}"
fi
if [ -n "${OFFLOAD_RATIO-}" ]; then
  set -- "$@" --enable-hierarchical-cache --hicache-ratio "$OFFLOAD_RATIO"
fi
if [ -n "${SHARED-}" ]; then
  set -- "$@" --radix-eviction-policy priority
fi
exec ${SGLANG:-python -m sglang.launch_server} "$@"
