{{/* What router and worker pods share: their volumes, and the init containers that bring models and caches. */}}

{{/* One emptyDir per writable place, because the root file system is read-only: volumes of a pod. Takes root, pool,
     worker (bool). */}}
{{- define "ostrya.volumes" -}}
{{- $model := .pool.model -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if .worker }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .pool.sharedMemory }}
- name: compile-cache
  {{- if eq .pool.compileCache.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .pool.compileCache.claimName | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .pool.compileCache.sizeLimit }}
  {{- end }}
{{- if include "ostrya.downloads" .pool }}
- name: start-reports
  emptyDir:
    sizeLimit: 1Mi
{{- end }}
{{- end }}
{{- if eq $model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.pvc.claimName | quote }}
    readOnly: true
{{- else if eq $model.source "gcsFuse" }}
- name: model
  csi:
    driver: gcsfuse.csi.storage.gke.io
    readOnly: true
    volumeAttributes:
      bucketName: {{ $model.gcsFuse.bucket | quote }}
      mountOptions: {{ $model.gcsFuse.mountOptions | quote }}
- name: gke-gcsfuse-cache
  emptyDir:
    medium: Memory
    sizeLimit: {{ $model.gcsFuse.cacheSizeLimit }}
{{- else if .pool.fetch }}
- name: model
  emptyDir:
    # Routers take a tokenizer only; but a .gguf file has it and the weights in one.
    sizeLimit: {{ $model.download.sizeLimit }}
    {{- if and .worker $model.download.medium }}
    medium: {{ $model.download.medium }}
    {{- end }}
{{- end }}
{{- with .root.Values.redis }}
{{- if and (eq .mode "external") .external.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .external.caSecret | quote }}
    items:
      - key: {{ .external.caKey | quote }}
        path: ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/* Mounts of the main container. */}}
{{- define "ostrya.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .worker }}
- name: shm
  mountPath: /dev/shm
- name: compile-cache
  mountPath: /var/cache/ostrya
{{- if include "ostrya.downloads" .pool }}
- name: start-reports
  mountPath: /run/ostrya
  readOnly: true
{{- end }}
{{- end }}
{{- if ne .pool.model.source "baked" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- with .root.Values.redis }}
{{- if and (eq .mode "external") .external.caSecret }}
- name: redis-ca
  mountPath: /etc/ostrya/redis-ca
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* Not empty if a worker's init containers download something. */}}
{{- define "ostrya.downloads" -}}
{{- if or .fetch .compileCache.tarball }}yes{{ end -}}
{{- end -}}

{{/* Init containers; the main container starts when all is there. Takes root, pool, worker, image, security. */}}
{{- define "ostrya.initContainers" -}}
{{- if or .pool.fetch (and .worker .pool.compileCache.tarball) }}
initContainers:
  {{- if .pool.fetch }}
  - name: fetch-model
    {{- include "ostrya.fetchContainer" . | nindent 4 }}
    args:
      - fetch
      - {{ .pool.fetch | quote }}
      - {{ .pool.modelPath | quote }}
      - --phase=fetch_model
      {{- if .worker }}
      - --report-dir=/run/ostrya
      {{- else }}
      - --only=tokenizer
      {{- end }}
    {{- if and (eq .pool.model.source "huggingFace") .pool.model.huggingFace.tokenSecret }}
    env:
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef:
            name: {{ .pool.model.huggingFace.tokenSecret | quote }}
            key: {{ .pool.model.huggingFace.tokenKey | quote }}
    {{- end }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: model
        mountPath: /models
      {{- if .worker }}
      - name: start-reports
        mountPath: /run/ostrya
      {{- end }}
  {{- end }}
  {{- if and .worker .pool.compileCache.tarball }}
  - name: fetch-compile-cache
    {{- include "ostrya.fetchContainer" . | nindent 4 }}
    args:
      - fetch
      - {{ .pool.compileCache.tarball | quote }}
      - /var/cache/ostrya/xla
      - --phase=fetch_compile_cache
      - --report-dir=/run/ostrya
      - --optional
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: compile-cache
        mountPath: /var/cache/ostrya
      - name: start-reports
        mountPath: /run/ostrya
  {{- end }}
{{- end }}
{{- end -}}

{{/* It runs before the main container and not beside it, so the pod needs no more for having it. What it writes to a
     volume in memory counts as its own. */}}
{{- define "ostrya.fetchContainer" -}}
{{- $resources := deepCopy (.worker | ternary .pool.resources .pool.router.resources) -}}
{{- range list "requests" "limits" -}}
{{- $_ := unset (get $resources . | default dict) "google.com/tpu" -}}
{{- end -}}
image: {{ .image | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- .security | nindent 2 }}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{/* Annotations of a pod, a user's own last. Those of a pod that mounts a bucket ask GKE for the FUSE sidecar, without
     limits. Takes root, container, pool, own. */}}
{{- define "ostrya.podAnnotations" -}}
{{- $annotations := merge (dict "kubectl.kubernetes.io/default-container" .container) (include "ostrya.redisChecksum" .root | fromJson) -}}
{{- if eq .pool.model.source "gcsFuse" -}}
{{- $annotations = merge $annotations (dict "gke-gcsfuse/volumes" "true" "gke-gcsfuse/cpu-limit" "0" "gke-gcsfuse/memory-limit" "0" "gke-gcsfuse/ephemeral-storage-limit" "0") -}}
{{- end -}}
{{- mergeOverwrite $annotations .own | toYaml -}}
{{- end -}}
