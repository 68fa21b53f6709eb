#!/bin/sh
# vLLM for agents: serve.sh MODEL [more arguments of vllm serve]. See README.md beside this file.
#   VLLM=vllm            the command
#   TOOL_PARSER=hermes   how the model writes tool calls; "" where agents have no tools
#   OFFLOAD_GIB=64       host memory for evicted contexts; at least the size of the GPU's KV cache
#   PINS=1               contexts of agents in tool waits stay on the GPU, for runs with kvflow=True
set -eu
model=$1
shift
set -- "$model" --enable-prompt-tokens-details --scheduling-policy priority --enable-request-id-headers "$@"
if [ -n "${TOOL_PARSER-hermes}" ]; then
  set -- "$@" --enable-auto-tool-choice --tool-call-parser "${TOOL_PARSER-hermes}"
fi
pin='{"kv_connector": "PinConnector", "kv_connector_module_path": "batch_agent.vllm_pin", "kv_role": "kv_both"}'
# offload_prompt_only: false keeps the answers' part of a context too. An agent's next turn begins with them.
offload='{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
  {"cpu_bytes_to_use": '"$((${OFFLOAD_GIB:-0} * 1073741824))"', "offload_prompt_only": false}}'
if [ -n "${PINS-}" ] && [ -n "${OFFLOAD_GIB-}" ]; then
  both='{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config":
    {"connectors": ['"$pin, $offload"']}}'
  set -- "$@" --kv-transfer-config "$both"
elif [ -n "${PINS-}" ]; then
  set -- "$@" --kv-transfer-config "$pin"
elif [ -n "${OFFLOAD_GIB-}" ]; then
  set -- "$@" --kv-transfer-config "$offload"
fi
exec ${VLLM:-vllm} serve "$@"
