{{/* Single values and pairs of values that the schema takes and that cannot work, each with its sentence. What of a slice,
     a model source or a drain cannot work is refused where that is worked out (_pool.tpl, _tpu.tpl, _release.tpl). */}}

{{/* Takes a list of (whether, sentence); fails with the first that is so. */}}
{{- define "ostrya.refuse" -}}
{{- range . -}}
{{- if first . -}}{{- fail (last .) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ostrya.refusals.release" -}}
{{- $values := .Values -}}
{{- $bundled := $values.redis.bundled -}}
{{- $dashboards := $values.monitoring.dashboards -}}
{{- $port := ":([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])" -}}
{{- $url := $values.redis.external.url -}}
{{- $otlp := $values.tracing.otlpEndpoint -}}
{{- $limit := dig "limits" "memory" "" $bundled.resources | default "1E" -}}
{{- include "ostrya.refuse" (list
  (list (not (regexMatch "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9]([-_.a-z0-9]*[a-z0-9])?)*/?)?$" $values.image.registry))
    (printf "image.registry is %q; it must be a host and path in lower case, without a scheme, such as registry.example/team" $values.image.registry))
  (list (contains "@" $url)
    "redis.external.url holds a user or password; they go into redis.external.username and the Secret redis.external.existingSecret")
  (list (not (regexMatch (printf "^(rediss?://[-A-Za-z0-9.]+(%s)?(/[0-9]+)?)?$" $port) $url))
    (printf "redis.external.url is %q; it must be redis://HOST:PORT/DB or rediss://HOST:PORT/DB, with a port from 1 to 65535" $url))
  (list (not (regexMatch (printf "^((https://)?[-A-Za-z0-9.]+%s/?)?$" $port) $otlp))
    (printf "tracing.otlpEndpoint is %q; it must be HOST:PORT of an OTLP gRPC collector, or https://HOST:PORT for TLS, with a port from 1 to 65535" $otlp))
  (list (and $values.priorityClass.create (hasPrefix "system-" $values.priorityClass.name))
    (printf "priorityClass.name is %s, but Kubernetes keeps system- for its own; choose another, or set priorityClass.create to false" $values.priorityClass.name))
  (list (not (regexMatch (include "ostrya.labelKey" $) $dashboards.label))
    (printf "monitoring.dashboards.label is %q, which is no label key; use one such as grafana_dashboard" $dashboards.label))
  (list (not (regexMatch "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$" $dashboards.labelValue))
    (printf "monitoring.dashboards.labelValue is %q; a label's value has at most 63 letters, digits, - _ . and begins and ends with a letter or digit" $dashboards.labelValue))
  (list (gt (mulf (include "ostrya.amount" $bundled.maxMemory) 4 | float64) (mulf (include "ostrya.amount" $limit) 3 | float64))
    (printf "redis.bundled.maxMemory is %s, above three quarters of redis.bundled.resources.limits.memory %v; Valkey needs room beside its data: lower it or raise the limit" $bundled.maxMemory $limit))
) -}}
{{- include "ostrya.freeLabels" (dict "where" "monitoring.dashboards.label" "labels" (dict $dashboards.label "")) -}}
{{- include "ostrya.refusals.image" (dict "at" "redis.bundled.image" "image" $bundled.image) -}}
{{- include "ostrya.refusals.resources" (dict "at" "redis.bundled.resources" "resources" $bundled.resources) -}}
{{- include "ostrya.refusals.tolerations" (dict "at" "redis.bundled.tolerations" "tolerations" $bundled.tolerations) -}}
{{- range list "clients" "prometheus" "dns" "apiServer" "externalRedis" "otlp" "downloads" -}}
{{- include "ostrya.refusals.peers" (dict "at" (printf "networkPolicy.%s" .) "peers" (get $values.networkPolicy .)) -}}
{{- end -}}
{{- include "ostrya.refusals.accounts" . -}}
{{- end -}}

{{/* Takes root, and pool as ostrya.pool makes it. */}}
{{- define "ostrya.refusals.pool" -}}
{{- $values := .root.Values -}}
{{- $policy := $values.networkPolicy -}}
{{- $pool := .pool -}}
{{- $at := $pool.where -}}
{{- $router := $pool.router -}}
{{- $engine := $pool.engine -}}
{{- $model := $pool.model -}}
{{- $scaling := $pool.autoscaling -}}
{{- $scraper := get (dict "gmp" "gmp" "prometheus-adapter" "prometheus-operator") $scaling.hpaMetrics -}}
{{- $isAuto := eq (toString $engine.numPages) "auto" -}}
{{- $cached := mul (sub (int64 ($isAuto | ternary 0 $engine.numPages)) 1) (int64 $engine.pageSize) -}}
{{- $gs := "^(gs://[a-z0-9][-_.a-z0-9]{2,221}/\\S+%s)?$" -}}
{{- $limit := dig "limits" "memory" "" $pool.resources | default "1E" -}}
{{- $download := and (ne $pool.fetch "") (eq $model.download.medium "Memory") | ternary $model.download.sizeLimit "0" -}}
{{- include "ostrya.refuse" (list
  (list (and (ne $router.service.type "ClusterIP") $policy.enabled (not $policy.clients))
    (printf "%s.router.service.type is %s, but networkPolicy.clients is empty, which lets in this namespace alone; set networkPolicy.clients to who may call (an ipBlock, say), or networkPolicy.enabled to false" $at $router.service.type))
  (list (and (eq $scaling.type "hpa") (ne $values.monitoring.provider $scraper))
    (printf "%s.autoscaling.hpaMetrics is %s but monitoring.provider is %s, so an HPA would find no metrics; set monitoring.provider to %s, or choose another hpaMetrics, or autoscaling.type keda" $at $scaling.hpaMetrics $values.monitoring.provider $scraper))
  (list (gt (int64 $engine.maxPrefillChunkTokens) (int64 $engine.maxStepTokens))
    (printf "%s.engine.maxPrefillChunkTokens is %v, above maxStepTokens %v; a part is at most one step: lower it or raise maxStepTokens" $at $engine.maxPrefillChunkTokens $engine.maxStepTokens))
  (list (ne (eq $engine.weights "f32") (and (ne $engine.weights "auto") (eq $engine.dtype "float32")))
    (printf "%s.engine.weights is %s and dtype %s; int4, int8 and bf16 go with bfloat16, f32 with float32, auto with both" $at $engine.weights $engine.dtype))
  (list (and $engine.maxContextTokens (not $isAuto) (gt (int64 $engine.maxContextTokens) $cached))
    (printf "%s.engine.maxContextTokens is %v, but numPages %v (one is kept) of pageSize %v hold %d tokens; lower it or raise numPages" $at $engine.maxContextTokens $engine.numPages $engine.pageSize $cached))
  (list (ge (addf (include "ostrya.amount" $pool.sharedMemory) (include "ostrya.amount" $download) | float64) (include "ostrya.amount" $limit | float64))
    (printf "%s.resources.limits.memory is %v, but sharedMemory %s%s may fill it alone, because volumes in memory count as the pod's; raise the limit" $at $limit $pool.sharedMemory (eq $download "0" | ternary "" (printf " and model.download.sizeLimit %s" $download))))
  (list (not (regexMatch "^([-._A-Za-z0-9]+/[-._A-Za-z0-9]+)?$" $model.huggingFace.id))
    (printf "%s.model.huggingFace.id is %q; it must be OWNER/NAME, such as Qwen/Qwen3-8B" $at $model.huggingFace.id))
  (list (not (regexMatch (printf $gs "") $model.gs.url))
    (printf "%s.model.gs.url is %q; it must be gs://BUCKET/PATH of a directory or a .gguf file" $at $model.gs.url))
  (list (not (regexMatch "^([a-z0-9][-_.a-z0-9]*[a-z0-9])?$" $model.gcsFuse.bucket))
    (printf "%s.model.gcsFuse.bucket is %q; it must be the name of a bucket, without gs:// and path" $at $model.gcsFuse.bucket))
  (list (regexMatch "(^|/)\\.\\.(/|$)" $model.gcsFuse.path)
    (printf "%s.model.gcsFuse.path is %q; it must stay in the bucket: remove the .." $at $model.gcsFuse.path))
  (list (regexMatch "(^|/)\\.\\.(/|$)" $model.pvc.path)
    (printf "%s.model.pvc.path is %q; it must stay in the claim: remove the .." $at $model.pvc.path))
  (list (not (regexMatch (printf $gs "\\.(tar|tar\\.gz|tgz)") $pool.compileCache.tarball))
    (printf "%s.compileCache.tarball is %q; it must be gs://BUCKET/PATH that ends in .tar, .tar.gz or .tgz" $at $pool.compileCache.tarball))
) -}}
{{- range $where, $pods := dict $at $pool (printf "%s.router" $at) $router -}}
{{- include "ostrya.refusals.image" (dict "at" (printf "%s.image" $where) "image" $pods.image) -}}
{{- include "ostrya.refusals.resources" (dict "at" (printf "%s.resources" $where) "resources" $pods.resources) -}}
{{- include "ostrya.refusals.tolerations" (dict "at" (printf "%s.tolerations" $where) "tolerations" $pods.tolerations) -}}
{{- range $pods.spreadOver -}}
{{- include "ostrya.refuse" (list (list (not (regexMatch (include "ostrya.labelKey" $) .))
  (printf "%s.spreadOver has %q, which is no label key; use one such as topology.kubernetes.io/zone" $where .))) -}}
{{- end -}}
{{- range $pods.extraEnv -}}
{{- include "ostrya.refuse" (list (list (and (hasKey . "value") (hasKey . "valueFrom"))
  (printf "%s.extraEnv has %s with value and valueFrom; remove one" $where .name))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes where, with, fields: mappings that null would take away. */}}
{{- define "ostrya.refusals.null" -}}
{{- range .fields -}}
{{- include "ostrya.refuse" (list (list (not (kindIs "map" (get $.with .)))
  (printf "%s.%s is null; remove the line, or say what differs from the default" $.where .))) -}}
{{- end -}}
{{- end -}}

{{- define "ostrya.refusals.image" -}}
{{- include "ostrya.refuse" (list (list (not (regexMatch "^(\\S+(:[A-Za-z0-9_][-A-Za-z0-9_.]*|@sha256:[0-9a-f]{64}))?$" .image))
  (printf "%s is %q; it must be NAME:TAG or NAME@sha256:DIGEST" .at .image))) -}}
{{- end -}}

{{- define "ostrya.refusals.resources" -}}
{{- range $name, $limit := .resources.limits | default dict -}}
{{- $request := get ($.resources.requests | default dict) $name | default "0" -}}
{{- include "ostrya.refuse" (list (list (gt (include "ostrya.amount" $request | float64) (include "ostrya.amount" $limit | float64))
  (printf "%s.requests.%s is %v, above limits.%s %v; lower it or raise the limit" $.at $name $request $name $limit))) -}}
{{- end -}}
{{- end -}}

{{- define "ostrya.refusals.tolerations" -}}
{{- range .tolerations -}}
{{- include "ostrya.refuse" (list
  (list (and (eq (.operator | default "") "Exists") .value)
    (printf "%s has operator Exists with value %s; remove the value, or use operator Equal" $.at .value))
  (list (and (not .key) (ne (.operator | default "") "Exists"))
    (printf "%s has an entry without key; name the taint's key, or set operator to Exists, which tolerates all" $.at))
  (list (and (hasKey . "tolerationSeconds") (ne (.effect | default "") "NoExecute"))
    (printf "%s has tolerationSeconds; they need effect NoExecute" $.at))
) -}}
{{- end -}}
{{- end -}}

{{- define "ostrya.refusals.peers" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])" -}}
{{- $cidr := printf "^((%s\\.){3}%s/(3[0-2]|[12]?[0-9])|[0-9a-fA-F]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$" $octet $octet -}}
{{- range .peers -}}
{{- include "ostrya.refuse" (list (list (and (hasKey . "ipBlock") (gt (len .) 1))
  (printf "%s has a peer with ipBlock and a selector; make them two entries" $.at))) -}}
{{- with .ipBlock -}}
{{- range prepend (.except | default list) .cidr -}}
{{- include "ostrya.refuse" (list (list (not (regexMatch $cidr .))
  (printf "%s has %q, which is no range of addresses; write ADDRESS/BITS, such as 10.0.0.0/8" $.at .))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One object for each name. */}}
{{- define "ostrya.refusals.accounts" -}}
{{- $made := dict -}}
{{- range $name, $_ := .Values.pools -}}
{{- $pool := include "ostrya.pool" (dict "root" $ "name" $name) | fromJson -}}
{{- range $at, $account := dict (printf "%s.serviceAccount" $pool.where) $pool.serviceAccount (printf "%s.router.serviceAccount" $pool.where) $pool.router.serviceAccount -}}
{{- if $account.create -}}
{{- include "ostrya.refuse" (list (list (hasKey $made $account.name)
  (printf "%s.name is %s, which %s creates already; give it another name, or set create to false in one of the two" $at $account.name (get $made $account.name)))) -}}
{{- $_ := set $made $account.name $at -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ostrya.labelKey" -}}
^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$
{{- end -}}

{{/* The number that a Kubernetes quantity or a Valkey size stands for. */}}
{{- define "ostrya.amount" -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) -}}
{{- $of := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
  "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976
  "kb" 1024 "mb" 1048576 "gb" 1073741824 -}}
{{- mulf (trimSuffix $unit (toString .)) (get $of $unit) -}}
{{- end -}}
