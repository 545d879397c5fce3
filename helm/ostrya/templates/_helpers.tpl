{{/* Names, labels, and the small pieces that every template uses. */}}

{{/* At most 26 characters, so that every name made from it and a pool's (15) keeps within 63, and a StatefulSet's
     within 49: Kubernetes appends a revision hash to it, LeaderWorkerSet two ordinals. Names of Services begin with a
     letter and have no dots. A changed name gets a hash, so that two releases stay apart. */}}
{{- define "ostrya.fullname" -}}
{{- $name := .Values.fullnameOverride | default (contains "ostrya" .Release.Name | ternary .Release.Name (printf "%s-ostrya" .Release.Name)) -}}
{{- if and (le (len $name) 26) (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" (regexReplaceAll "^([0-9])" (replace "." "-" $name) "r$1" | trunc 19 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{- end -}}

{{/* What selects pods; never changes over the life of a release. Takes root, component, and pool if there is one. */}}
{{- define "ostrya.selector" -}}
app.kubernetes.io/name: ostrya
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
ostrya.dev/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Pods carry no chart or app version: an upgrade that changes neither image nor settings restarts no TPU worker. */}}
{{- define "ostrya.podLabels" -}}
{{ include "ostrya.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with merge dict (.extra | default dict) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: root, name, component, and optionally pool, labels, annotations. */}}
{{- define "ostrya.metadata" -}}
name: {{ .name | quote }}
{{- if not .clusterScoped }}
namespace: {{ .root.Release.Namespace | quote }}
{{- end }}
labels:
  {{- if .component }}
  {{- include "ostrya.selector" . | nindent 2 }}
  {{- else }}
  app.kubernetes.io/name: ostrya
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
  {{- end }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
  {{- with merge dict (.labels | default dict) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge dict (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image of ours: root, name, and override, which wins whole. */}}
{{- define "ostrya.image" -}}
{{- $image := .root.Values.image -}}
{{- .override | default (printf "%s%s:%s" (empty $image.registry | ternary "" (printf "%s/" (trimSuffix "/" $image.registry))) .name ($image.tag | default .root.Chart.AppVersion)) -}}
{{- end -}}

{{- define "ostrya.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Arguments from a list of one-entry dicts {flag: value}, in order; null and "" are left out, whole numbers stay
     whole (YAML hands them over as floats), true is the bare flag and false nothing. */}}
{{- define "ostrya.args" -}}
{{- range . }}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $flag }}
{{- end }}
{{- else if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- {{ printf "--%s=%s" $flag (include "ostrya.number" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "ostrya.number" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Seconds that end whole, rounded up. */}}
{{- define "ostrya.sum" -}}
{{- $sum := 0.0 -}}
{{- range . }}{{ $sum = addf $sum . }}{{ end -}}
{{- ceil $sum | int64 -}}
{{- end -}}

{{- define "ostrya.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .group }}
fsGroup: {{ .group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "ostrya.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Even over each key where the cluster can, never at the price of a pod that finds no node. */}}
{{- define "ostrya.spread" -}}
{{- $selector := include "ostrya.selector" . -}}
{{- with .over }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Environment of router and worker that reach Redis. The password comes from a Secret and is put together with the
     URL by Kubernetes, so it is in no argument, ConfigMap or rendered manifest. */}}
{{- define "ostrya.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "bundled" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.bundled.existingSecret | default (printf "%s-redis" (include "ostrya.fullname" .)) | quote }}
      key: {{ $redis.bundled.passwordKey | quote }}
- name: OSTRYA_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "ostrya.fullname" . }}-redis:6379/0
{{- else -}}
{{- $external := $redis.external -}}
{{- $user := "" -}}
{{- if $external.existingSecret -}}
{{- $user = printf "%s:$(REDIS_PASSWORD)@" $external.username }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $external.existingSecret | quote }}
      key: {{ $external.passwordKey | quote }}
{{- end }}
- name: OSTRYA_REDIS_URL
  value: {{ regexReplaceAllLiteral "^(rediss?://)" $external.url (printf "%s%s" (regexFind "^rediss?://" $external.url) $user) }}
  {{- if $external.caSecret }}?ssl_ca_certs=/etc/ostrya/redis-ca/ca.crt{{ end }}
{{- end }}
{{- end -}}
