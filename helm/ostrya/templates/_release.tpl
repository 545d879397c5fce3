{{/* What concerns the release as a whole; every render checks it once. */}}
{{- define "ostrya.validate" -}}
{{- if not .Values.pools -}}
{{- fail "pools is empty; name at least one pool, such as pools.default" -}}
{{- end -}}
{{- if and .Values.maintenance.enabled (ne .Values.discovery "kubernetes") -}}
{{- fail (printf "maintenance.enabled needs discovery kubernetes, which tells the routers the workers' nodes; discovery is %s" .Values.discovery) -}}
{{- end -}}
{{- include "ostrya.freeLabels" (dict "where" "commonLabels" "labels" .Values.commonLabels) -}}
{{- include "ostrya.freeLabels" (dict "where" "monitoring.labels" "labels" .Values.monitoring.labels) -}}
{{- include "ostrya.freeLabels" (dict "where" "redis.bundled.podLabels" "labels" .Values.redis.bundled.podLabels) -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "external" -}}
{{- if not $redis.external.url -}}
{{- fail "redis.mode is external; it needs redis.external.url, such as rediss://redis.example:6379/0" -}}
{{- end -}}
{{- if $redis.bundled.existingSecret -}}
{{- fail "redis.mode is external but redis.bundled.existingSecret is set; the password of an external Redis is redis.external.existingSecret" -}}
{{- end -}}
{{- if and $redis.external.username (not $redis.external.existingSecret) -}}
{{- fail (printf "redis.external.username is %s but there is no password; set redis.external.existingSecret" $redis.external.username) -}}
{{- end -}}
{{- if and $redis.external.caSecret (not (hasPrefix "rediss://" $redis.external.url)) -}}
{{- fail (printf "redis.external.caSecret is set but redis.external.url is %s; TLS needs rediss://" $redis.external.url) -}}
{{- end -}}
{{- else -}}
{{- range $field := list "url" "username" "existingSecret" "caSecret" -}}
{{- if get $redis.external $field -}}
{{- fail (printf "redis.external.%s is set but redis.mode is bundled; set redis.mode to external, or remove the field" $field) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.priorityClass.create (not .Values.priorityClass.name) -}}
{{- fail "priorityClass.create needs priorityClass.name, the name of the PriorityClass" -}}
{{- end -}}
{{- include "ostrya.refusals.release" . -}}
{{- include "ostrya.refusals.taken" . -}}
{{- end -}}

{{/* Labels that no selector, service or scraper of ours reads. */}}
{{- define "ostrya.freeLabels" -}}
{{- range $key := keys .labels | sortAlpha -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "leaderworkerset.sigs.k8s.io/" $key) (has $key (list "helm.sh/chart" "ostrya.dev/pool" "kueue.x-k8s.io/queue-name")) -}}
{{- fail (printf "%s has %s, which the chart sets or selects by; choose another key" $.where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
