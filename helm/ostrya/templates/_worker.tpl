{{/* The pod of a worker, for StatefulSet, Deployment, and both templates of a LeaderWorkerSet. Takes root, pool,
     follower (bool): a host of a slice other than host 0. */}}
{{- define "ostrya.workerPod" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $ids := dict "root" $root "component" "worker" "pool" $pool.name -}}
{{- $image := include "ostrya.image" (dict "root" $root "name" (printf "ostrya/worker-%s" (eq $pool.backend "roofline" | ternary "cpu" $pool.backend)) "override" $pool.image) -}}
{{- $asRoot := and $pool.tpu (eq $root.Values.podSecurity "baseline") -}}
{{- $security := include "ostrya.workerSecurity" $asRoot -}}
{{- $pod := dict "root" $root "pool" $pool "worker" true "image" $image "security" $security -}}
metadata:
  labels:
    {{- include "ostrya.podLabels" (merge (dict "extra" $pool.podLabels) $ids) | nindent 4 }}
  annotations:
    {{- include "ostrya.podAnnotations" (dict "root" $root "container" "worker" "pool" $pool "own" $pool.podAnnotations) | nindent 4 }}
spec:
  serviceAccountName: {{ $pool.serviceAccount.name | quote }}
  automountServiceAccountToken: false
  # Service links would set OSTRYA_… variables, which are options of ours.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $pool.grace }}
  {{- with $root.Values.priorityClass.name }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  securityContext:
    {{- if $asRoot }}
    # baseline: root, for nodes whose TPU devices belong to root.
    runAsUser: 0
    runAsGroup: 0
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
    {{- else }}
    {{- include "ostrya.podSecurityContext" (dict "user" 65532 "group" 65532) | nindent 4 }}
    {{- end }}
  {{- include "ostrya.pullSecrets" $root | nindent 2 }}
  {{- include "ostrya.initContainers" $pod | nindent 2 }}
  containers:
    - name: worker
      image: {{ $image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        {{- include "ostrya.args" (list
          (dict "model" ($pool.simulate.model | default $pool.modelPath))
          (dict "model-name" $pool.servedName)
          (dict "worker-id" "$(POD_NAME)")
          (dict "pool" $pool.name)
          (dict "host" "0.0.0.0")
          (dict "port" 50052)
          (dict "advertise-address" "$(POD_IP):50052")
          (dict "metrics-port" 9401)
          (dict "backend" $pool.backend)
          (dict "slice" $pool.simulate.slice)
          (dict "slice-topology" (eq $pool.backend "torchtpu" | ternary $pool.slice.topology ""))
          (dict "compile-cache" (eq $pool.backend "torchtpu" | ternary "/var/cache/ostrya/torchtpu" ""))
          (dict "tensor-parallel" $pool.tensorParallel)
          (dict "dtype" $pool.engine.dtype)
          (dict "weights" $pool.engine.weights)
          (dict "page-size" $pool.engine.pageSize)
          (dict "num-pages" $pool.engine.numPages)
          (dict "routing-stride" $pool.engine.routingStride)
          (dict "max-context-tokens" $pool.engine.maxContextTokens)
          (dict "max-running" $pool.engine.maxRunning)
          (dict "max-step-tokens" $pool.engine.maxStepTokens)
          (dict "max-prefill-chunk-tokens" $pool.engine.maxPrefillChunkTokens)
          (dict "num-threads" $pool.engine.numThreads)
          (dict "max-waiting" $pool.maxWaiting)
          (dict "max-message-bytes" $pool.maxMessageBytes)
          (dict "drain-timeout-s" $pool.drainTimeoutSeconds)
          (dict "slice-port" (gt (int $pool.hosts) 1 | ternary 50053 ""))
          (dict "join-timeout-s" (gt (int $pool.hosts) 1 | ternary (divf $pool.startupBudget 2 | ceil | int64) ""))
          (dict "start-report-dir" (include "ostrya.downloads" $pool | empty | ternary "" "/run/ostrya"))
          (dict "metric-aliases" $pool.metricAliases)
          (dict "otlp-endpoint" $root.Values.tracing.otlpEndpoint)
          (dict "log-level" $pool.logLevel)
        ) | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- include "ostrya.redisEnv" $root | nindent 8 }}
        {{- include "ostrya.tpuEnv" $pool | nindent 8 }}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        # The other hosts of a slice open this port for probes alone; its name is what routers look for.
        - name: {{ .follower | ternary "health" "grpc" }}
          containerPort: 50052
        - name: metrics
          containerPort: 9401
        {{- if and (gt (int $pool.hosts) 1) (not .follower) }}
        # Where host 0 awaits the others.
        - name: slice
          containerPort: 50053
        {{- end }}
      # The port of a worker that serves opens after warm-up, so the budget covers weights and every compile; that of
      # another host at once.
      startupProbe:
        grpc:
          port: 50052
          service: liveness
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ divf $pool.startupBudget 2 | ceil | int64 }}
      readinessProbe:
        grpc:
          port: 50052
          service: {{ .follower | ternary "follower" "ostrya.api.v1.WorkerService" }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      # Says that the worker's own process answers. An engine that hangs or dies is its business: it starts another one in
      # place, not ready meanwhile, and exits by itself when that does not help.
      livenessProbe:
        grpc:
          port: 50052
          service: liveness
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      lifecycle:
        preStop:
          sleep:
            # All hosts of a slice are told to end together; those that follow host 0 go on until it has drained.
            seconds: {{ $pool.preStopSeconds }}
      securityContext:
        {{- $security | nindent 8 }}
      resources:
        {{- include "ostrya.workerResources" $pool | nindent 8 }}
      volumeMounts:
        {{- include "ostrya.mounts" $pod | nindent 8 }}
  volumes:
    {{- include "ostrya.volumes" $pod | nindent 4 }}
  {{- include "ostrya.workerPlace" . | nindent 2 }}
  {{- include "ostrya.spread" (merge (dict "over" $pool.spreadOver) $ids) | nindent 2 }}
{{- end -}}

{{/* Takes whether the worker runs as root. */}}
{{- define "ostrya.workerSecurity" -}}
{{- if . -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- else -}}
{{- include "ostrya.containerSecurityContext" $ -}}
{{- end -}}
{{- end -}}

{{/* A pod takes all chips of its host. */}}
{{- define "ostrya.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .tpu -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (set (get $resources . | default dict) "google.com/tpu" (int64 $.derived.chipsPerHost)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* What libtpu and torch_xla ask the environment for (pytorch/xla: torch_xla/_internal/tpu.py). TPU_SKIP_MDS_QUERY keeps
     torch_xla from the metadata server. On slices of several hosts LeaderWorkerSet's webhook sets TPU_WORKER_ID and
     TPU_WORKER_HOSTNAMES, and leaves a container alone that has them already (lws: pkg/utils/accelerators/tpu.go), so
     they are set for one host only. From them and from LeaderWorkerSet's own variables a worker knows which host it is. */}}
{{- define "ostrya.tpuEnv" -}}
{{- if .tpu }}
{{- if eq .backend "xla" }}
- name: PJRT_DEVICE
  value: TPU
- name: XLA_PERSISTENT_CACHE_PATH
  # Below the volume, because `ostrya fetch` makes a directory whole and renames it.
  value: /var/cache/ostrya/xla
{{- end }}
- name: TPU_SKIP_MDS_QUERY
  value: "true"
- name: TPU_ACCELERATOR_TYPE
  value: {{ .derived.type }}
{{- if eq (int .hosts) 1 }}
- name: TPU_WORKER_ID
  value: "0"
- name: TPU_WORKER_HOSTNAMES
  value: localhost
{{- end }}
{{- end }}
{{- end -}}

{{/* Where a worker may run. */}}
{{- define "ostrya.workerPlace" -}}
{{- $pool := .pool -}}
{{- $tolerations := $pool.tolerations -}}
{{- if $pool.tpu -}}
{{- $tolerations = prepend $tolerations (dict "key" "google.com/tpu" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- with merge $pool.nodeLabels $pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
