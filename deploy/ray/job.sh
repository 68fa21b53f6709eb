#!/bin/sh
# Submit a run to a Ray cluster that is there. The driver runs on the head node; workers are actors on all nodes.
#
#   deploy/ray/job.sh http://HEAD:8265 FOLDER spec.yaml
#
# FOLDER has the spec, the inputs and the Python modules that the spec names; Ray copies it to the nodes. Results and
# the run directory are on the head node, in RUNS, so that a second job goes on where the first one stopped.
set -eu
address=${1:?usage: job.sh ADDRESS FOLDER SPEC}
folder=${2:?usage: job.sh ADDRESS FOLDER SPEC}
spec=${3:?usage: job.sh ADDRESS FOLDER SPEC}
runs=${RUNS:-/var/tmp/batch-agent-runs}
name=$(basename "${spec%.*}")
exec ray job submit --address "$address" --working-dir "$folder" -- \
  batch-agent run "$spec" --ray auto --workers auto --run-dir "${RUN_DIR:-$runs/$name}" --resume --output "$runs/$name.jsonl"
