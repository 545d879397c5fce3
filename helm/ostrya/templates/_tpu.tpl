{{/* What the chart knows of TPUs, and what of it a pool's slice is.

     Sources: xpk (AI-Hypercomputer/xpk: src/xpk/core/system_characteristics.py), custom ComputeClasses of
     GoogleCloudPlatform/accelerated-platforms, GKE "About TPUs". Slices above 256 chips exist; nobody serves one replica
     on them. `type` and `cores` make TPU_ACCELERATOR_TYPE, which counts TensorCores (v6e-8 is 8 chips, v5p-8 is 4). */}}
{{- define "ostrya.tpu.generations" -}}
v5e:
  accelerator: tpu-v5-lite-podslice
  type: v5litepod
  cores: 1
  machines:
    ct5lp-hightpu-1t: {chips: 1, topologies: ["1x1"]}
    ct5lp-hightpu-4t: {chips: 4, topologies: ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]}
    ct5lp-hightpu-8t: {chips: 8, topologies: ["2x4"]}
v5p:
  accelerator: tpu-v5p-slice
  type: v5p
  cores: 2
  machines:
    ct5p-hightpu-4t:
      chips: 4
      topologies: ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8"]
v6e:
  accelerator: tpu-v6e-slice
  type: v6e
  cores: 1
  machines:
    ct6e-standard-1t: {chips: 1, topologies: ["1x1"]}
    ct6e-standard-4t: {chips: 4, topologies: ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]}
    ct6e-standard-8t: {chips: 8, topologies: ["2x4"]}
tpu7x:
  accelerator: tpu7x
  type: tpu7x
  cores: 2
  # Its two cores are two devices; those of the others are one.
  devicesPerChip: 2
  machines:
    tpu7x-standard-1t: {chips: 1, topologies: ["1x1x1"]}
    tpu7x-standard-4t:
      chips: 4
      topologies: ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8"]
{{- end -}}

{{/* The slice of a pool as JSON: accelerator, chips, devices, hosts, chipsPerHost, type, and ambiguous, which is true where another
     machine type forms the same topology. {} without a slice. Takes where (for messages) and slice. */}}
{{- define "ostrya.slice" -}}
{{- $slice := .slice -}}
{{- $at := printf "%s.slice" .where -}}
{{- $generations := include "ostrya.tpu.generations" . | fromYaml -}}
{{- if not $slice.generation -}}
{{- if or $slice.machineType $slice.topology -}}
{{- fail (printf "%s has machineType %q and topology %q but no generation; set generation to one of %s, or remove them for CPUs" $at $slice.machineType $slice.topology (keys $generations | sortAlpha | join ", ")) -}}
{{- end -}}
{}
{{- else -}}
{{- $generation := get $generations $slice.generation -}}
{{- if not $generation -}}
{{- fail (printf "%s.generation is %q; it must be one of %s" $at $slice.generation (keys $generations | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $known := list -}}
{{- $forming := list -}}
{{- range $machine := keys $generation.machines | sortAlpha -}}
{{- range (get $generation.machines $machine).topologies -}}
{{- $known = append $known . -}}
{{- if eq . $slice.topology -}}{{- $forming = append $forming $machine -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (has $slice.topology $known) -}}
{{- fail (printf "%s.topology is %q; generation %s has %s" $at $slice.topology $slice.generation ($known | uniq | join ", ")) -}}
{{- end -}}
{{- $machine := get $generation.machines $slice.machineType -}}
{{- if not $machine -}}
{{- fail (printf "%s.machineType is %q; generation %s forms topology %s with %s" $at $slice.machineType $slice.generation $slice.topology (join " or " $forming)) -}}
{{- end -}}
{{- if not (has $slice.machineType $forming) -}}
{{- fail (printf "%s.machineType is %s, which forms %s and not topology %s; that takes %s" $at $slice.machineType (join ", " $machine.topologies) $slice.topology (join " or " $forming)) -}}
{{- end -}}
{{- $chips := 1 -}}
{{- range splitList "x" $slice.topology -}}{{- $chips = mul $chips (atoi .) -}}{{- end -}}
{{- dict "accelerator" $generation.accelerator "chips" $chips "devices" (mul $chips ($generation.devicesPerChip | default 1)) "chipsPerHost" $machine.chips "hosts" (div $chips $machine.chips) "type" (printf "%s-%d" $generation.type (mul $chips $generation.cores)) "ambiguous" (gt (len $forming) 1) | toJson -}}
{{- end -}}
{{- end -}}
