#!/usr/bin/env bash
# Makes the GKE node pool that a TPU preset of the chart (helm/ostrya/values/PRESET.yaml) needs.
#
#     PROJECT=… CLUSTER=… LOCATION=… ZONE=… deploy/gke/node-pools.sh PRESET
#
#   PRESET         v5e-1 v5e-8 v6e-1 v6e-8 v5p-4 tpu7x-4 tpu7x-16
#   CAPACITY       on-demand (default), spot, flex-start, or reservation with RESERVATION=name
#   SLICES         how many slices (default 1): nodes of one pool for a preset with one host, pools for one with several
#   POLICY_ONLY=1  makes the workload policy of a preset with several hosts and no pool: what a ComputeClass needs
#   DRY_RUN=1      prints the commands, runs nothing
#
# Flags, and which exclude which: `gcloud container node-pools create` (docs.cloud.google.com/sdk/gcloud/reference), and
# what xpk passes (AI-Hypercomputer/xpk: src/xpk/core/nodepool.py, capacity.py): no --tpu-topology on one host, since the
# machine type says it; on tpu7x a workload policy instead of it (docs.cloud.google.com/kubernetes-engine/docs/concepts/
# tpu-ironwood). Not run on hardware by this project.
set -euo pipefail

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }

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

slices=${SLICES:-1}
[[ "$slices" =~ ^[1-9][0-9]*$ ]] || { echo "SLICES is '$slices'; it must be a number, 1 or more" >&2; exit 2; }
nodes=$((hosts == 1 ? slices : hosts))
pools=$((hosts == 1 ? 1 : slices))
arguments=(
  --project="$PROJECT" --cluster="$CLUSTER" --location="$LOCATION" --node-locations="$ZONE"
  --machine-type="$machine" --enable-gvnic --enable-image-streaming
)

case "${CAPACITY:-on-demand}" in
  on-demand)   arguments+=(--num-nodes="$nodes") ;;
  spot)        arguments+=(--num-nodes="$nodes" --spot) ;;
  reservation) arguments+=(--num-nodes="$nodes" --reservation-affinity=specific --reservation="${RESERVATION:?set RESERVATION}") ;;
  # Nodes come when a pod asks for them, and go when none does. They live for a limited time and are not repaired.
  flex-start)
    arguments+=(--num-nodes=0 --flex-start --enable-autoscaling --max-nodes="$nodes" --location-policy=ANY)
    arguments+=(--reservation-affinity=none --no-enable-autorepair) ;;
  *) usage ;;
esac

if ((hosts > 1)); then
  # Ironwood's hosts are placed by a workload policy, which also gives the topology. All pools of a topology share it.
  policy=ostrya-$topology
  where=(--project="$PROJECT" --region="${ZONE%-*}")
  if [ -n "${DRY_RUN:-}" ] || ! gcloud compute resource-policies describe "$policy" "${where[@]}" >/dev/null 2>&1; then
    run gcloud compute resource-policies create workload-policy "$policy" "${where[@]}" \
      --type=HIGH_THROUGHPUT --accelerator-topology="$topology"
  fi
  arguments+=(--placement-policy="$policy")
elif [ -n "${POLICY_ONLY:-}" ]; then
  echo "POLICY_ONLY: $preset has one host and needs no workload policy" >&2
  exit 2
fi

[ -z "${POLICY_ONLY:-}" ] || exit 0
for ((number = 1; number <= pools; number++)); do
  pool=ostrya-$preset
  ((number == 1)) || pool+=-$number
  run gcloud container node-pools create "$pool" "${arguments[@]}"
done
