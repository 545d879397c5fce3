{{/* A pool as the templates see it: poolDefaults, then what the pool says, then what follows from both. Everything that
     cannot work is refused here, with a sentence that says what would be right; single fields are the schema's task. */}}

{{/* JSON of one pool: its values, and name, slice (derived), workload, tensorParallel, worker and router names, grace
     times. Takes root and name. */}}
{{- define "ostrya.pool" -}}
{{- $root := .root -}}
{{- $full := include "ostrya.fullname" $root -}}
{{- $where := printf "pools.%s" .name -}}
{{- if or (eq .name "redis") (regexMatch "-(routers?|workers?|slices)$" .name) -}}
{{- fail (printf "%s: the name is taken by objects of the chart; it must not be redis or end in -router(s), -worker(s) or -slices" $where) -}}
{{- end -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.poolDefaults) (deepCopy (get $root.Values.pools .name | default dict)) -}}
{{- $router := mergeOverwrite (deepCopy $root.Values.router) (deepCopy $pool.router) -}}
{{- include "ostrya.refusals.null" (dict "where" "poolDefaults" "with" $pool "fields" (list "model" "simulate" "engine" "slice" "compileCache" "resources" "autoscaling" "podDisruptionBudget" "serviceAccount")) -}}
{{- include "ostrya.refusals.null" (dict "where" "router" "with" $router "fields" (list "resources" "service" "autoscaling" "podDisruptionBudget" "serviceAccount")) -}}
{{- $slice := include "ostrya.slice" (dict "where" $where "slice" $pool.slice) | fromJson -}}
{{- $tpu := not (empty $slice) -}}
{{- $_ := set $pool "name" .name -}}
{{- $_ := set $pool "where" $where -}}
{{- $_ := set $pool "router" $router -}}
{{- $_ := set $pool "tpu" $tpu -}}
{{- $_ := set $pool "derived" $slice -}}
{{- $_ := set $pool "hosts" ($tpu | ternary $slice.hosts 1) -}}
{{- $_ := set $pool "service" (printf "%s-%s" $full .name) -}}
{{- $_ := set $pool "routers" (printf "%s-%s-routers" $full .name) -}}
{{- $_ := set $pool "workers" (printf "%s-%s-workers" $full .name) -}}
{{- $_ := set $pool "workerName" (printf "%s-%s-worker" $full .name) -}}
{{- $_ := set $router "name" (printf "%s-%s-router" $full .name) -}}
{{- include "ostrya.pool.compute" $pool -}}
{{- include "ostrya.pool.nodes" $pool -}}
{{- include "ostrya.pool.workload" $pool -}}
{{- include "ostrya.pool.model" $pool -}}
{{- include "ostrya.pool.scaling" $pool -}}
{{- include "ostrya.pool.extras" $pool -}}
{{- include "ostrya.refusals.pool" (dict "root" $root "pool" $pool) -}}
{{- include "ostrya.account" (dict "where" (printf "%s.serviceAccount" $where) "account" $pool.serviceAccount "default" $pool.workerName) -}}
{{- include "ostrya.account" (dict "where" (printf "%s.router.serviceAccount" $where) "account" $router.serviceAccount "default" $router.name) -}}
{{- $_ := set $pool "startupBudget" ($pool.startupBudgetSeconds | default ($tpu | ternary 1800 300)) -}}
{{- $needed := include "ostrya.sum" (list $pool.preStopSeconds $pool.drainTimeoutSeconds 10) -}}
{{- $_ := set $pool "grace" (include "ostrya.grace" (dict "where" $where "given" $pool.terminationGracePeriodSeconds "needed" $needed "sum" "preStopSeconds + drainTimeoutSeconds + 10")) -}}
{{- $needed = include "ostrya.sum" (list $router.preStopSeconds $router.farewellSeconds $router.drainTimeoutSeconds 10) -}}
{{- $_ := set $router "grace" (include "ostrya.grace" (dict "where" (printf "%s.router" $where) "given" $router.terminationGracePeriodSeconds "needed" $needed "sum" "preStopSeconds + farewellSeconds + drainTimeoutSeconds + 10")) -}}
{{- toJson $pool -}}
{{- end -}}

{{/* Backend, slice, tensor parallelism and chip counts agree. */}}
{{- define "ostrya.pool.compute" -}}
{{- $onCpu := has .backend (list "cpu" "roofline") -}}
{{- if and .tpu $onCpu -}}
{{- fail (printf "%s: backend is %s but slice is %s %s; set backend to xla or torchtpu, or remove the slice" .where .backend .slice.generation .slice.topology) -}}
{{- end -}}
{{- if and (eq .backend "roofline") (not (and .simulate.model .simulate.slice)) -}}
{{- fail (printf "%s: backend is roofline; it needs simulate.model and simulate.slice, such as kimi-k3 and tpu7x-16" .where) -}}
{{- end -}}
{{- if and (ne .backend "roofline") (or .simulate.model .simulate.slice) -}}
{{- fail (printf "%s.simulate is set but backend is %s; set backend to roofline, or remove it" .where .backend) -}}
{{- end -}}
{{- if and (eq .backend "roofline") (or (ne .model.source "baked") .model.baked.model) -}}
{{- fail (printf "%s: backend is roofline, which reads no weights; remove model.source and model.%s, and name simulate.model" .where .model.source) -}}
{{- end -}}
{{- if and (not .tpu) (not $onCpu) -}}
{{- fail (printf "%s: backend %s needs a TPU; set slice.generation, slice.machineType and slice.topology" .where .backend) -}}
{{- end -}}
{{- $devices := .tpu | ternary .derived.devices 1 -}}
{{- $parallel := .engine.tensorParallel | default $devices -}}
{{- if ne (int $parallel) (int $devices) -}}
{{- if .tpu -}}
{{- fail (printf "%s.engine.tensorParallel is %v but slice %s has %v devices; a replica uses all of them: set %v, or null" .where $parallel .slice.topology $devices $devices) -}}
{{- end -}}
{{- fail (printf "%s.engine.tensorParallel is %v; backend %s takes 1, or null" .where $parallel .backend) -}}
{{- end -}}
{{- if and (eq .backend "xla") (gt (int .hosts) 1) -}}
{{- fail (printf "%s: backend is xla, which runs on one host, but slice %s of %s has %v hosts; set backend to torchtpu, or take a slice of one host" .where .slice.topology .slice.machineType .hosts) -}}
{{- end -}}
{{- $_ := set . "tensorParallel" $parallel -}}
{{- if lt (int .engine.maxStepTokens) (int .engine.maxRunning) -}}
{{- fail (printf "%s.engine.maxStepTokens is %v, below maxRunning %v; every running request takes at least one token of a step: raise it or lower maxRunning" .where .engine.maxStepTokens .engine.maxRunning) -}}
{{- end -}}
{{- $resources := .resources -}}
{{- $where := .where -}}
{{- $perHost := .tpu | ternary .derived.chipsPerHost 0 -}}
{{- $slice := .slice -}}
{{- range $kind := list "requests" "limits" -}}
{{- $given := dig $kind "google.com/tpu" "" $resources -}}
{{- if and (ne (toString $given) "") (ne (toString $given) (toString $perHost)) -}}
{{- if $perHost -}}
{{- fail (printf "%s.resources.%s asks for %v google.com/tpu; a pod takes all chips of its host, and %s has %v: remove the line, the chart sets it" $where $kind $given $slice.machineType $perHost) -}}
{{- end -}}
{{- fail (printf "%s.resources.%s asks for %v google.com/tpu but the pool has no slice; set slice.generation, slice.machineType and slice.topology" $where $kind $given) -}}
{{- end -}}
{{- end -}}
{{- if and .computeClass (not .tpu) -}}
{{- fail (printf "%s.computeClass is %s but the pool has no slice; for CPU nodes of a ComputeClass use nodeSelector" .where .computeClass) -}}
{{- end -}}
{{- end -}}

{{/* Labels of the nodes that a slice needs. With a ComputeClass GKE chooses and makes the nodes, so no TPU label may narrow
     it. Sets nodeLabels. */}}
{{- define "ostrya.pool.nodes" -}}
{{- $labels := dict -}}
{{- if .computeClass -}}
{{- $labels = dict "cloud.google.com/compute-class" .computeClass -}}
{{- range list "cloud.google.com/gke-tpu-accelerator" "cloud.google.com/gke-tpu-topology" "node.kubernetes.io/instance-type" -}}
{{- if hasKey $.nodeSelector . -}}
{{- fail (printf "%s.nodeSelector has %s, but computeClass %s chooses the nodes; remove one of the two" $.where . $.computeClass) -}}
{{- end -}}
{{- end -}}
{{- else if .tpu -}}
{{- $labels = dict "cloud.google.com/gke-tpu-accelerator" .derived.accelerator "cloud.google.com/gke-tpu-topology" .slice.topology -}}
{{- if .derived.ambiguous -}}
{{- $_ := set $labels "node.kubernetes.io/instance-type" .slice.machineType -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := $labels -}}
{{- $given := get $.nodeSelector $key | default $value -}}
{{- if ne $given $value -}}
{{- fail (printf "%s.nodeSelector has %s: %s, but slice or computeClass needs %s; remove the line, the chart sets it" $.where $key $given $value) -}}
{{- end -}}
{{- end -}}
{{- $_ := set . "nodeLabels" $labels -}}
{{- end -}}

{{/* The object that runs the workers. A LeaderWorkerSet has a name of its own, because its controller gives it to a
     StatefulSet and a Service: a pool may change between one host and several. Sets workloadName, workloadVersion. */}}
{{- define "ostrya.pool.workload" -}}
{{- $many := gt (int .hosts) 1 -}}
{{- if and $many (has .workload (list "StatefulSet" "Deployment")) -}}
{{- fail (printf "%s.workload is %s but slice %s of %s has %v hosts; those need LeaderWorkerSet, or auto" .where .workload .slice.topology .slice.machineType .hosts) -}}
{{- end -}}
{{- if and (not $many) (eq .workload "LeaderWorkerSet") -}}
{{- fail (printf "%s.workload is LeaderWorkerSet but a replica has one host; use StatefulSet, Deployment or auto" .where) -}}
{{- end -}}
{{- if eq .workload "auto" -}}
{{- $_ := set . "workload" ($many | ternary "LeaderWorkerSet" "StatefulSet") -}}
{{- end -}}
{{- $_ := set . "workloadName" ($many | ternary (printf "%s-slices" .service) .workerName) -}}
{{- $_ := set . "workloadVersion" ($many | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1") -}}
{{- end -}}

{{/* Exactly one model source, whole. Sets modelPath, and fetch (source of the init container's download) where there is
     one. */}}
{{- define "ostrya.pool.model" -}}
{{- $model := .model -}}
{{- $where := .where -}}
{{- $fields := dict "baked" (list "model") "pvc" (list "claimName" "path") "gcsFuse" (list "bucket" "path") "gs" (list "url") "huggingFace" (list "id" "file" "revision" "tokenSecret") -}}
{{- range $source, $names := $fields -}}
{{- range $names -}}
{{- if and (ne $source $model.source) (get (get $model $source) .) -}}
{{- fail (printf "%s.model.%s.%s is set but model.source is %s; set source to %s, or remove the field" $where $source . $model.source $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $first := get $fields $model.source | first -}}
{{- if not (or (eq $model.source "baked") (get (get $model $model.source) $first)) -}}
{{- fail (printf "%s.model.source is %s; it needs model.%s.%s" $where $model.source $model.source $first) -}}
{{- end -}}
{{- $path := "" -}}
{{- $fetch := "" -}}
{{- if eq $model.source "baked" -}}
{{- $path = $model.baked.model -}}
{{- else if eq $model.source "pvc" -}}
{{- $path = printf "/models/%s" (trimPrefix "/" $model.pvc.path) | trimSuffix "/" -}}
{{- else if eq $model.source "gcsFuse" -}}
{{- $path = printf "/models/%s" (trimPrefix "/" $model.gcsFuse.path) | trimSuffix "/" -}}
{{- else if eq $model.source "gs" -}}
{{- $fetch = $model.gs.url -}}
{{- $path = printf "/models/%s" (base (trimSuffix "/" $model.gs.url) | trimSuffix ".gguf") -}}
{{- else -}}
{{- $file := empty $model.huggingFace.file | ternary "" (printf "/%s" $model.huggingFace.file) -}}
{{- $revision := empty $model.huggingFace.revision | ternary "" (printf "@%s" $model.huggingFace.revision) -}}
{{- $fetch = printf "hf://%s%s%s" $model.huggingFace.id $file $revision -}}
{{- $path = printf "/models/%s" (base $model.huggingFace.id) -}}
{{- end -}}
{{- $_ := set . "modelPath" $path -}}
{{- $_ := set . "servedName" ($model.name | default .simulate.model) -}}
{{- $_ := set . "fetch" $fetch -}}
{{- if and (eq .compileCache.type "pvc") (not .compileCache.claimName) -}}
{{- fail (printf "%s.compileCache.type is pvc; it needs compileCache.claimName" $where) -}}
{{- end -}}
{{- if and (ne .compileCache.type "pvc") .compileCache.claimName -}}
{{- fail (printf "%s.compileCache.claimName is set but compileCache.type is %s; set type to pvc, or remove the claim" $where .compileCache.type) -}}
{{- end -}}
{{- if and (eq .compileCache.type "pvc") .compileCache.tarball -}}
{{- fail (printf "%s.compileCache.tarball is set but compileCache.type is pvc; a claim keeps the cache by itself: set type to emptyDir, or remove the tarball" $where) -}}
{{- end -}}
{{- end -}}

{{/* Autoscaling of workers and routers. */}}
{{- define "ostrya.pool.scaling" -}}
{{- $bounds := list (dict "at" (printf "%s.autoscaling" .where) "on" (ne .autoscaling.type "none") "with" .autoscaling) (dict "at" (printf "%s.router.autoscaling" .where) "on" .router.autoscaling.enabled "with" .router.autoscaling) -}}
{{- range $bounds -}}
{{- if gt (int .with.minReplicas) (int .with.maxReplicas) -}}
{{- fail (printf "%s.minReplicas is %v, above maxReplicas %v; lower it or raise maxReplicas" .at .with.minReplicas .with.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .autoscaling.type "keda") (not .autoscaling.kedaServerAddress) -}}
{{- fail (printf "%s.autoscaling.type is keda; it needs autoscaling.kedaServerAddress, the URL of a Prometheus" .where) -}}
{{- end -}}
{{- if and .router.autoscaling.enabled (not (dig "requests" "cpu" "" .router.resources)) -}}
{{- fail (printf "%s.router.autoscaling scales on CPU; it needs router.resources.requests.cpu" .where) -}}
{{- end -}}
{{- end -}}

{{/* What users add collides with nothing that the chart sets. */}}
{{- define "ostrya.pool.extras" -}}
{{- include "ostrya.freeLabels" (dict "where" (printf "%s.podLabels" .where) "labels" .podLabels) -}}
{{- include "ostrya.freeLabels" (dict "where" (printf "%s.router.podLabels" .where) "labels" .router.podLabels) -}}
{{- $set := list "POD_NAME" "POD_IP" "REDIS_PASSWORD" "PJRT_DEVICE" "XLA_PERSISTENT_CACHE_PATH" "TPU_SKIP_MDS_QUERY" "TPU_ACCELERATOR_TYPE" "TPU_WORKER_ID" "TPU_WORKER_HOSTNAMES" "LWS_LEADER_ADDRESS" "LWS_GROUP_SIZE" "LWS_WORKER_INDEX" -}}
{{- range $at, $env := dict (printf "%s.extraEnv" .where) .extraEnv (printf "%s.router.extraEnv" .where) .router.extraEnv -}}
{{- $seen := list -}}
{{- range $env -}}
{{- if hasPrefix "OSTRYA_" .name -}}
{{- fail (printf "%s has %s; options of Ostrya are values of this chart, and its arguments win over the environment: use the value" $at .name) -}}
{{- end -}}
{{- if has .name $set -}}
{{- fail (printf "%s has %s, which the chart or LeaderWorkerSet sets; remove it" $at .name) -}}
{{- end -}}
{{- if has .name $seen -}}
{{- fail (printf "%s has %s twice; remove one" $at .name) -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Sets the account's name. */}}
{{- define "ostrya.account" -}}
{{- if not .account.name -}}
{{- if not .account.create -}}
{{- fail (printf "%s.create is false; it needs %s.name, the account to use" .where .where) -}}
{{- end -}}
{{- $_ := set .account "name" .default -}}
{{- end -}}
{{- end -}}

{{/* terminationGracePeriodSeconds: what is needed, or what is given if that is enough. */}}
{{- define "ostrya.grace" -}}
{{- if kindIs "invalid" .given -}}
{{- .needed -}}
{{- else if lt (int64 .given) (int64 .needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, below %s (%s); Kubernetes would kill the pod while it drains: raise it, or null computes it" .where (int64 .given) .needed .sum) -}}
{{- else -}}
{{- int64 .given -}}
{{- end -}}
{{- end -}}
