{{/* A text as Kubernetes must read it in command, args and env, where $(NAME) would be expanded. */}}
{{- define "train.literal" -}}
{{- . | replace "$" "$$" -}}
{{- end -}}

{{/* Environment of the ranks as a JSON object. */}}
{{- define "train.environment" -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- $env := dict
    "MASKFLEET_COMPILED_CODE" (printf "/%s/%s/.compiled" .Values.shared_fs .Values.log_dir)
    "MASTER_ADDR" (first $facts.workers)
    "MASTER_PORT" (.Values.rendezvous_port | int | toString)
    "NCCL_DEBUG" .Values.nccl_debug
    "NCCL_SOCKET_IFNAME" .Values.nccl_socket_ifname
    "OMP_NUM_THREADS" "1"
    "PYTHONUNBUFFERED" "1" -}}
{{- if gt (int $facts.efa) 0 -}}
  {{- /* With huge pages, forks of data loaders fail when the node has too few of them. */ -}}
  {{- $env = merge $env (dict "FI_PROVIDER" "efa" "FI_EFA_USE_HUGE_PAGE" "0") -}}
{{- end -}}
{{- if and (gt (int $facts.gpus) 1) (regexMatch "^g[56]\\." .Values.gpu_instance_type) -}}
  {{- /* Their GPUs have no direct connection; AWS's cheat sheet: twice as fast as NCCL's own copies. */ -}}
  {{- $env = merge $env (dict "NCCL_SHM_USE_CUDA_MEMCPY" "1") -}}
{{- end -}}
{{- if .Values.min_nodes -}}
  {{- /* The supervisors choose where the ranks meet. */ -}}
  {{- $env = omit $env "MASTER_ADDR" "MASTER_PORT" -}}
{{- end -}}
{{- merge (deepCopy .Values.env) $env | toJson -}}
{{- end -}}

{{/* The run's folder. */}}
{{- define "train.folder" -}}
{{- printf "/%s/%s/%s" .Values.shared_fs .Values.log_dir (.Values.run_id | default .Release.Name) -}}
{{- end -}}

{{/* What offers the run's metrics to Prometheus; Kubernetes fills in the pod's address and the worker's number. */}}
{{- define "train.exporter" -}}
{{- $folder := include "train.literal" (include "train.folder" .) -}}
{{- list "python3" "-m" "maskfleet.launch.exporter" $folder "$(POD_IP)" (.Values.metrics_port | int | toString) "$(REPLICA_INDEX)" | toJson -}}
{{- end -}}

{{/* What every rank runs, as a JSON list. */}}
{{- define "train.rank" -}}
{{- if .Values.fabric_test -}}
  {{- list "python3" "-m" "maskfleet.bench.fabric" | toJson -}}
{{- else -}}
  {{- concat (list "python3" "-m" "maskfleet" "train" (include "train.folder" .)) (include "train.run" . | fromJsonArray) | toJson -}}
{{- end -}}
{{- end -}}

{{/* Options that say what is trained, as a JSON list. */}}
{{- define "train.run" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- $argv := list -}}
{{- if $v.run_yaml -}}
  {{- $argv = list "--config" "/etc/maskfleet/run.yaml" -}}
{{- else -}}
  {{- $sets := list (printf "data.root=/%s/%s" $facts.data_fs ($v.data_dir | default "data/coco2017")) -}}
  {{- range $pair := list
      (list "mode_mask" "MODE_MASK") (list "mode_fpn" "MODE_FPN")
      (list "data_train" "DATA.TRAIN") (list "data_val" "DATA.VAL")
      (list "eval_period_in_epochs" "TRAIN.EVAL_PERIOD") (list "base_lr" "TRAIN.BASE_LR")
      (list "lr_schedule" "TRAIN.LR_SCHEDULE") (list "batch_size_per_gpu" "TRAIN.BATCH_SIZE_PER_GPU")
      (list "images_per_epoch" "train.images_per_epoch") (list "steps_per_epoch" "TRAIN.STEPS_PER_EPOCH")
      (list "backbone_norm" "BACKBONE.NORM") -}}
    {{- $value := index $v (first $pair) -}}
    {{- if not (kindIs "invalid" $value) -}}
      {{- $text := ternary $value (toRawJson $value) (kindIs "string" $value) -}}
      {{- if kindIs "bool" $value }}{{ $text = ternary "True" "False" $value }}{{ end -}}
      {{- $sets = append $sets (printf "%s=%s" (last $pair) $text) -}}
    {{- end -}}
  {{- end -}}
  {{- if kindIs "slice" $v.lr_epoch_schedule -}}
    {{- $sets = append $sets (printf "train.epoch_schedule=%s" (toRawJson $v.lr_epoch_schedule)) -}}
  {{- else if $v.lr_epoch_schedule -}}
    {{- $sets = append $sets (printf "TRAIN.LR_EPOCH_SCHEDULE=%s" $v.lr_epoch_schedule) -}}
  {{- end -}}
  {{- if $v.backbone_weights -}}
    {{- $sets = append $sets (printf "BACKBONE.WEIGHTS=/%s/%s" $facts.data_fs $v.backbone_weights) -}}
  {{- end -}}
  {{- $sets = concat $sets (ternary (list $v.extra_config) $v.extra_config (kindIs "string" $v.extra_config)) -}}
  {{- $argv = concat $argv (list "--recipe" ($v.recipe | default $v.preset | default "standard")) -}}
  {{- range $set := $sets -}}
    {{- $argv = concat $argv (list "--set" $set) -}}
  {{- end -}}
{{- end -}}
{{- toJson $argv -}}
{{- end -}}

{{/* The launcher's whole command as a JSON list; no shell reads it. */}}
{{- define "train.launcher" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- /* The Open MPI of our image, not that of a base image. Its path alone would also put /usr/bin before the venv in PATH. */ -}}
{{- $argv := list "python3" "-I" "/etc/maskfleet/pod.py" "launch" "/etc/mpi/hostfile" "/usr/bin/mpirun" "--noprefix" "-np" ($facts.ranks | int | toString) "--hostfile" "/etc/mpi/hostfile" "--map-by" "slot" "--bind-to" "none" "--tag-output" -}}
{{- range $pair := list
    (list "orte_keep_fqdn_hostnames" "1")
    (list "plm_rsh_agent" "ssh") (list "plm_rsh_args" "-F /etc/maskfleet/ssh_config") (list "plm_rsh_no_tree_spawn" "1")
    (list "pml" "ob1") (list "btl" "^openib") (list "btl_tcp_if_exclude" $v.if_exclude) (list "oob_tcp_if_exclude" $v.if_exclude)
    (list "oob_tcp_keepalive_time" "30") (list "oob_tcp_keepalive_intvl" "10") (list "oob_tcp_keepalive_probes" "6") -}}
  {{- $argv = concat $argv (list "-mca" (first $pair) (last $pair)) -}}
{{- end -}}
{{- range $name := concat (list "PATH" "LD_LIBRARY_PATH") (include "train.environment" . | fromJson | keys | sortAlpha) -}}
  {{- $argv = concat $argv (list "-x" $name) -}}
{{- end -}}
{{- $argv = concat $argv (list "python3" "-I" "/etc/maskfleet/pod.py" "rank") (include "train.rank" . | fromJsonArray) -}}
{{- $literal := list -}}
{{- range $argument := $argv -}}
  {{- $literal = append $literal (include "train.literal" $argument) -}}
{{- end -}}
{{- toJson $literal -}}
{{- end -}}

{{/* What the only container of an elastic worker runs, as a JSON list; no shell reads it. */}}
{{- define "train.supervisor" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- $argv := list "python3" "-m" "maskfleet.launch.eks.elastic.pod" (include "train.folder" .) "--name" .Release.Name -}}
{{- range $option, $value := dict
    "--workers" $v.gpu_nodes "--slots" $facts.slots "--min-nodes" $v.min_nodes
    "--max-restarts" $v.backoff_limit "--wait-s" $v.wait_for_workers_s -}}
  {{- $argv = concat $argv (list $option (int $value | toString)) -}}
{{- end -}}
{{- $literal := list -}}
{{- range $argument := concat $argv (include "train.run" . | fromJsonArray) -}}
  {{- $literal = append $literal (include "train.literal" $argument) -}}
{{- end -}}
{{- toJson $literal -}}
{{- end -}}
