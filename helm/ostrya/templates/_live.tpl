{{/* What an upgrade takes from the objects that are there: replicas, the password of Redis, and whose names are taken.
     Offline, lookup finds nothing; what is decided of an object is in templates of their own that take it. */}}

{{/* replicas of a workload. Takes root, autoscaled, replicas, apiVersion, kind, name. */}}
{{- define "ostrya.replicas" -}}
{{- if not .autoscaled -}}
replicas: {{ .replicas }}
{{- else if .root.Release.IsUpgrade -}}
{{- include "ostrya.replicas.kept" (lookup .apiVersion .kind .root.Release.Namespace .name) -}}
{{- end -}}
{{- end -}}

{{/* replicas of an autoscaled workload that is there. Takes the live object, which may be empty.
     Kubernetes makes 1 of a field that Helm had set and sets no more, so such a field is repeated as it is now; with
     client-side apply always, because there the last manifest counts as having set it. With server-side apply (Helm 4)
     managedFields tells who has: once an autoscaler has scaled, it is not Helm, and repeating the number would be
     harmful: the release would hold a number that its rollback meets as a conflict. Who applies the object as a whole
     is who owns its label helm.sh/chart; others may apply an annotation, say. An Update by the same manager is from
     before a switch of methods. */}}
{{- define "ostrya.replicas.kept" -}}
{{- $replicas := include "ostrya.at" (dict "in" . "path" (list "spec" "replicas")) -}}
{{- $fields := list -}}
{{- $appliers := list -}}
{{- $owned := false -}}
{{- with include "ostrya.at" (dict "in" . "path" (list "metadata" "managedFields")) -}}
{{- range fromJsonArray . -}}
{{- if not (include "ostrya.at" (dict "in" . "path" (list "subresource"))) -}}
{{- $fields = append $fields . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $fields -}}
{{- $label := include "ostrya.at" (dict "in" . "path" (list "fieldsV1" "f:metadata" "f:labels" "f:helm.sh/chart")) -}}
{{- if and $label (eq "Apply" (include "ostrya.at" (dict "in" . "path" (list "operation")))) -}}
{{- $appliers = append $appliers (include "ostrya.at" (dict "in" . "path" (list "manager"))) -}}
{{- end -}}
{{- end -}}
{{- range $fields -}}
{{- if and (has (include "ostrya.at" (dict "in" . "path" (list "manager"))) $appliers) (include "ostrya.at" (dict "in" . "path" (list "fieldsV1" "f:spec" "f:replicas"))) -}}
{{- $owned = true -}}
{{- end -}}
{{- end -}}
{{- if and (or $owned (not $appliers)) (regexMatch "^[0-9]+$" $replicas) -}}
replicas: {{ $replicas }}
{{- end -}}
{{- end -}}

{{/* Base64 of the bundled Redis' password where the chart makes it, empty otherwise: the live Secret's, or a new one.
     Letters and digits, because it becomes part of a URL. Kept among the values, because every template that asks in
     one rendering must hear the same. */}}
{{- define "ostrya.redisPassword" -}}
{{- $redis := .Values.redis -}}
{{- if and (eq $redis.mode "bundled") (not $redis.bundled.existingSecret) -}}
{{- if not (hasKey $redis "generated") -}}
{{- $live := lookup "v1" "Secret" .Release.Namespace (printf "%s-redis" (include "ostrya.fullname" .)) -}}
{{- $old := include "ostrya.at" (dict "in" $live "path" (list "data" $redis.bundled.passwordKey)) -}}
{{- $_ := set $redis "generated" ($old | default (randAlphaNum 40 | b64enc)) -}}
{{- end -}}
{{- $redis.generated -}}
{{- end -}}
{{- end -}}

{{/* Annotation of every pod that has the password in its environment, so that it starts anew whenever the password is
     another: a rollback brings back the Secret of then, which a Redis made since has never read. Not of a Secret that
     is the user's, whose content is not for annotations. JSON. */}}
{{- define "ostrya.redisChecksum" -}}
{{- $password := include "ostrya.redisPassword" . -}}
{{- empty $password | ternary dict (dict "ostrya.dev/redis-password" (sha256sum $password | trunc 16)) | toJson -}}
{{- end -}}

{{/* Names join the release's and the pool's with -, so release a-b with pool c and release a with pool b-c want the same.
     A name belongs to who has it: selectors name the release and never change, so nothing can be taken over. Pools that
     collide do so in a Service, too; whatever else exists Helm refuses in words of its own. Cluster-wide names are joined
     with :, which none of their parts can have. */}}
{{- define "ostrya.refusals.taken" -}}
{{- $full := include "ostrya.fullname" . -}}
{{- $wanted := dict -}}
{{- range $name, $_ := .Values.pools -}}
{{- $_ := set $wanted (printf "%s-%s" $full $name) (printf "pools.%s" $name) -}}
{{- end -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- $_ := set $wanted (printf "%s-redis" $full) "redis.mode bundled" -}}
{{- end -}}
{{- range $name, $what := $wanted -}}
{{- include "ostrya.refusals.owner" (dict "root" $ "what" (printf "%s makes Service %s" $what $name) "live" (lookup "v1" "Service" $.Release.Namespace $name)
  "do" "give the pool another name, or set fullnameOverride before the first install") -}}
{{- end -}}
{{- with .Values.priorityClass -}}
{{- if .create -}}
{{- include "ostrya.refusals.owner" (dict "root" $ "what" (printf "priorityClass.create makes PriorityClass %s" .name) "live" (lookup "scheduling.k8s.io/v1" "PriorityClass" "" .name)
  "do" "set priorityClass.create to false here, or choose another name") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes root, what, live (may be empty), do. An object that no release has is Helm's own to refuse. */}}
{{- define "ostrya.refusals.owner" -}}
{{- $release := include "ostrya.at" (dict "in" .live "path" (list "metadata" "annotations" "meta.helm.sh/release-name")) -}}
{{- $namespace := include "ostrya.at" (dict "in" .live "path" (list "metadata" "annotations" "meta.helm.sh/release-namespace")) -}}
{{- include "ostrya.refuse" (list (list (and (ne $release "") (or (ne $release .root.Release.Name) (ne $namespace .root.Release.Namespace)))
  (printf "%s, which release %s of namespace %s has already; %s" .what $release $namespace .do))) -}}
{{- end -}}

{{/* What lies at a path of keys: text and numbers as they are, mappings and lists as JSON; empty if nothing does. */}}
{{- define "ostrya.at" -}}
{{- $at := .in -}}
{{- range .path -}}
{{- if kindIs "map" $at -}}{{- $at = get $at . -}}{{- else -}}{{- $at = "" -}}{{- end -}}
{{- end -}}
{{- if or (kindIs "map" $at) (kindIs "slice" $at) -}}
{{- toJson $at -}}
{{- else if not (kindIs "invalid" $at) -}}
{{- include "ostrya.number" $at -}}
{{- end -}}
{{- end -}}
