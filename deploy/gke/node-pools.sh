#!/usr/bin/env bash
# Makes the GKE node pool that a TPU preset of the chart (helm/ostrya/values/PRESET.yaml) needs.
#
#     PROJECT=… CLUSTER=… LOCATION=… ZONE=… deploy/gke/node-pools.sh PRESET
#
#   PRESET     v5e-1 v5e-8 v6e-1 v6e-8 v5p-4 tpu7x-4 tpu7x-16
#   CAPACITY   on-demand (default), spot, flex-start, or reservation with RESERVATION=name
#   SLICES     slices of a single-host preset in the pool (default 1); a multi-host pool is always one slice
#   DRY_RUN=1  prints the commands, runs nothing
#
# Flags, and which exclude which: `gcloud container node-pools create` (docs.cloud.google.com/sdk/gcloud/reference), and
# what xpk passes (AI-Hypercomputer/xpk: src/xpk/core/nodepool.py): no --tpu-topology on one host, since the machine type
# says it; on tpu7x a workload policy instead of it (docs.cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood).
# Not run on hardware by this project.
set -euo pipefail

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

preset=${1:-}
case "$preset" in
  v5e-1)    machine=ct5lp-hightpu-1t  topology=1x1   hosts=1 ;;
  v5e-8)    machine=ct5lp-hightpu-8t  topology=2x4   hosts=1 ;;
  v6e-1)    machine=ct6e-standard-1t  topology=1x1   hosts=1 ;;
  v6e-8)    machine=ct6e-standard-8t  topology=2x4   hosts=1 ;;
  v5p-4)    machine=ct5p-hightpu-4t   topology=2x2x1 hosts=1 ;;
  tpu7x-4)  machine=tpu7x-standard-4t topology=2x2x1 hosts=1 ;;
  tpu7x-16) machine=tpu7x-standard-4t topology=2x2x4 hosts=4 ;;
  *) usage ;;
esac
: "${PROJECT:?set PROJECT}" "${CLUSTER:?set CLUSTER}" "${LOCATION:?set LOCATION}" "${ZONE:?set ZONE}"

run() {
  printf '%q ' "$@"; echo
  [ -n "${DRY_RUN:-}" ] || "$@"
}

nodes=$((hosts == 1 ? ${SLICES:-1} : hosts))
pool=ostrya-$preset
arguments=(
  "$pool" --project="$PROJECT" --cluster="$CLUSTER" --location="$LOCATION" --node-locations="$ZONE"
  --machine-type="$machine" --enable-gvnic --enable-image-streaming
)

case "${CAPACITY:-on-demand}" in
  on-demand)   arguments+=(--num-nodes="$nodes") ;;
  spot)        arguments+=(--num-nodes="$nodes" --spot) ;;
  reservation) arguments+=(--num-nodes="$nodes" --reservation-affinity=specific --reservation="${RESERVATION:?set RESERVATION}") ;;
  # Nodes come when a pod asks for them, and go when none does.
  flex-start)  arguments+=(--num-nodes=0 --flex-start --reservation-affinity=none --enable-autoscaling --min-nodes=0 --max-nodes="$nodes") ;;
  *) usage ;;
esac

if ((hosts > 1)); then
  # Ironwood's hosts are placed by a workload policy, which also gives the topology.
  policy=ostrya-$topology
  run gcloud compute resource-policies create workload-policy "$policy" --project="$PROJECT" --region="${ZONE%-*}" \
    --type=HIGH_THROUGHPUT --accelerator-topology="$topology"
  arguments+=(--placement-policy="$policy")
fi
run gcloud container node-pools create "${arguments[@]}"
