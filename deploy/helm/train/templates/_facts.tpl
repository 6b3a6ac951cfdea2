{{/* Everything derived from the values, once, as JSON; refuses what cannot be. */}}
{{- define "train.facts" -}}
{{- $v := .Values -}}
{{- include "train.checks" . -}}
{{- $table := .Files.Get "files/instances.yaml" | fromYaml -}}
{{- $known := get $table $v.gpu_instance_type -}}
{{- if not $known -}}
  {{- range $field := list "gpus_per_node" "cpus_per_node" "memory_gib_per_node" -}}
    {{- if kindIs "invalid" (index $v $field) -}}
      {{- fail (printf "gpu_instance_type %q is not in this chart's table of instance types: set %s too" $v.gpu_instance_type $field) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $has := $known | default dict -}}
{{- $gpus := include "train.given" (list $v.gpus_per_node $has.gpus) | int -}}
{{- $slots := include "train.given" (list $v.slots_per_node (max $gpus 1)) | int -}}
{{- $efa := include "train.given" (list $v.efa_per_node (ternary ($has.efa | default 0) 0 (gt (int $v.gpu_nodes) 1))) | int -}}
{{- $cpus := include "train.given" (list $v.cpus_per_node $has.cpus) | int -}}
{{- $memory := include "train.given" (list $v.memory_gib_per_node $has.memory_gib) | int -}}
{{- if $known -}}
  {{- range $field, $pair := dict "gpus_per_node" (list $gpus $has.gpus) "efa_per_node" (list $efa $has.efa) "cpus_per_node" (list $cpus $has.cpus) "memory_gib_per_node" (list $memory $has.memory_gib) -}}
    {{- if gt (int (first $pair)) (int (last $pair)) -}}
      {{- fail (printf "%s is %d, but a worker on %s can have at most %d" $field (int (first $pair)) $v.gpu_instance_type (int (last $pair))) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and (gt $gpus 0) (gt $slots $gpus) -}}
  {{- fail (printf "slots_per_node is %d, but a worker has %d GPUs, one a rank" $slots $gpus) -}}
{{- end -}}
{{- $shm_mib := min (mulf (float64 $v.shm_gib) 1024.0 | int) (mul $memory 512) | int -}}
{{- $workers := list -}}
{{- range $index := until (int $v.gpu_nodes) -}}
  {{- $workers = append $workers (printf "%s-worker-%d.%s.%s.svc" $.Release.Name $index $.Release.Name $.Release.Namespace) -}}
{{- end -}}
{{- $zone := $v.single_zone | default (ternary "required" "preferred" (gt $efa 0)) -}}
{{- dict "gpus" $gpus "slots" $slots "efa" $efa "cpus" $cpus "memory_gib" $memory "shm_mib" $shm_mib "workers" $workers
    "ranks" (mul $slots (int $v.gpu_nodes)) "zone" $zone "port" 2222
    "data_fs" ($v.data_fs | default $v.shared_fs) "own_data" (and $v.data_fs (ne $v.data_fs $v.shared_fs) | not | not)
    "service_account" ($v.service_account | default .Release.Name) | toJson -}}
{{- end -}}

{{/* The first of two that is not null. */}}
{{- define "train.given" -}}
{{- if kindIs "invalid" (first .) }}{{ last . }}{{ else }}{{ first . }}{{ end -}}
{{- end -}}

{{/* Rules over several values; the message names the field. */}}
{{- define "train.checks" -}}
{{- $v := .Values -}}
{{- if gt (len .Release.Name) 40 -}}
  {{- fail (printf "the release name %q has %d characters; use at most 40, as names of pods are made from it" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- if contains "." .Release.Name -}}
  {{- fail (printf "the release name %q has a dot; use letters, digits and dashes, as hosts are named by it" .Release.Name) -}}
{{- end -}}
{{- /* The operator creates a Service of that name, and does not report it if the API refuses. */ -}}
{{- if not (regexMatch "^[a-z]" .Release.Name) -}}
  {{- fail (printf "the release name %q begins with a digit; begin it with a letter, as a Service is named by it" .Release.Name) -}}
{{- end -}}
{{- if not $v.image -}}
  {{- fail "image is required: the training image, such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/maskfleet@sha256:…" -}}
{{- end -}}
{{- if and $v.preset $v.recipe -}}
  {{- fail "preset and recipe both name what to train: set one of them" -}}
{{- end -}}
{{- range $pair := list (list "lr_schedule" "lr_epoch_schedule") (list "steps_per_epoch" "images_per_epoch") -}}
  {{- if not (or (kindIs "invalid" (index $v (first $pair))) (kindIs "invalid" (index $v (last $pair)))) -}}
    {{- fail (printf "%s and %s say the same in two units: set one of them" (first $pair) (last $pair)) -}}
  {{- end -}}
{{- end -}}
{{- if $v.run_yaml -}}
  {{- range $field := list "preset" "recipe" "data_dir" "base_lr" "lr_schedule" "lr_epoch_schedule" "batch_size_per_gpu" "images_per_epoch" "steps_per_epoch" "eval_period_in_epochs" "data_train" "data_val" "mode_fpn" "mode_mask" "backbone_norm" "backbone_weights" -}}
    {{- if not (kindIs "invalid" (index $v $field)) -}}
      {{- fail (printf "run_yaml is the whole run: put %s into it instead of into the values" $field) -}}
    {{- end -}}
  {{- end -}}
  {{- if $v.extra_config -}}
    {{- fail "run_yaml is the whole run: put extra_config into it instead of into the values" -}}
  {{- end -}}
  {{- $parsed := $v.run_yaml | fromYaml -}}
  {{- if hasKey $parsed "Error" -}}
    {{- fail (printf "run_yaml is not a YAML mapping: %s" $parsed.Error) -}}
  {{- end -}}
{{- end -}}
{{- if and $v.data_fs (ne $v.data_fs $v.shared_fs) (not $v.data_pvc) -}}
  {{- fail (printf "data_fs %q is not shared_fs %q: set data_pvc to the claim of its volume" $v.data_fs $v.shared_fs) -}}
{{- end -}}
{{- if and $v.data_pvc (or (not $v.data_fs) (eq $v.data_fs $v.shared_fs)) -}}
  {{- fail "data_pvc needs a data_fs of its own: set data_fs to a name other than shared_fs" -}}
{{- end -}}
{{- range $field := list "shared_fs" "data_fs" -}}
  {{- if has (index $v $field) (list "bin" "boot" "dev" "etc" "home" "lib" "lib32" "lib64" "libx32" "opt" "proc" "root" "run" "sbin" "sys" "tmp" "usr" "var") -}}
    {{- fail (printf "%s %q would cover the image's own /%s: use another name" $field (index $v $field) (index $v $field)) -}}
  {{- end -}}
{{- end -}}
{{- if $v.min_nodes -}}
  {{- if gt (int $v.min_nodes) (int $v.gpu_nodes) -}}
    {{- fail (printf "min_nodes is %d, but gpu_nodes is only %d" (int $v.min_nodes) (int $v.gpu_nodes)) -}}
  {{- end -}}
  {{- if $v.fabric_test -}}
    {{- fail "fabric_test needs all nodes at once: leave min_nodes out" -}}
  {{- end -}}
  {{- if semverCompare "<1.31-0" .Capabilities.KubeVersion.Version -}}
    {{- fail (printf "min_nodes needs Kubernetes 1.31 or newer, for successPolicy of Jobs; this is %s" .Capabilities.KubeVersion.Version) -}}
  {{- end -}}
{{- end -}}
{{- range $name := keys $v.env -}}
  {{- if has $name (list "PATH" "HOME" "MASTER_ADDR" "MASTER_PORT" "RANK" "WORLD_SIZE" "LOCAL_RANK" "LOCAL_WORLD_SIZE") -}}
    {{- fail (printf "env.%s is set by the chart, the image or mpirun: leave it out" $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
