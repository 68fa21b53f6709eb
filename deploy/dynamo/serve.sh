#!/bin/bash
# NVIDIA Dynamo for agents: a frontend and WORKERS workers on one host. serve.sh MODEL [arguments of the workers].
#   WORKERS=2                          each needs a GPU of its own (CUDA_VISIBLE_DEVICES is set to 0, 1, ...)
#   WORKER="python -m dynamo.vllm"     the worker; python -m dynamo.mocker simulates one without a GPU
#   FRONTEND="python -m dynamo.frontend"
# Ends with all that it started when one of them ends.
set -eu
model=$1
shift
export DYN_FILE_KV="${DYN_FILE_KV:-$(mktemp -d)}" DYN_DISCOVERY_BACKEND=file DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' INT TERM
# The router sends a turn to the worker that has its prefix; a session stays with its worker for ten minutes.
${FRONTEND:-python -m dynamo.frontend} --http-port 8000 --router-mode kv --router-session-affinity-ttl-secs 600 \
  --migration-limit 3 --enable-streaming-tool-dispatch &
number=0
while [ "$number" -lt "${WORKERS:-1}" ]; do
  if [ "${WORKER-}" ]; then
    $WORKER --model-path "$model" "$@" &
  else
    CUDA_VISIBLE_DEVICES=$number python -m dynamo.vllm --model "$model" "$@" &
  fi
  number=$((number + 1))
done
wait -n
