{{/* Labels of every object of a release. */}}
{{- define "stage-data.labels" -}}
{{ include "stage-data.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that never change in the life of a release. */}}
{{- define "stage-data.selector" -}}
app.kubernetes.io/name: maskfleet-stage-data
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* A Job cannot be changed, so each set of values has a Job of its own name: an upgrade replaces it. */}}
{{- define "stage-data.job" -}}
{{- printf "%s-%s" .Release.Name (.Values | toJson | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "stage-data.account" -}}
{{- .Values.service_account | default .Release.Name -}}
{{- end -}}

{{/* Where the files go: an absolute stage_dir must be on the volume. */}}
{{- define "stage-data.folder" -}}
{{- $mount := printf "/%s/" .Values.shared_fs -}}
{{- if hasPrefix "/" .Values.stage_dir -}}
{{- if not (hasPrefix $mount .Values.stage_dir) -}}
{{- fail (printf "stage_dir: %q is not on the volume, which is mounted at /%s" .Values.stage_dir .Values.shared_fs) -}}
{{- end -}}
{{- .Values.stage_dir -}}
{{- else -}}
{{- printf "%s%s" $mount .Values.stage_dir -}}
{{- end -}}
{{- end -}}

{{/* The command as a JSON list. Kubernetes replaces $(NAME) in it, and takes $$ for a plain dollar sign. */}}
{{- define "stage-data.args" -}}
{{- if .Values.preload -}}
{{- list "-m" "maskfleet" "data" "preload" (include "stage-data.folder" .) "--workers" (.Values.workers | int | toString) | toJson -}}
{{- else -}}
{{- $source := printf "s3://%s/%s" .Values.s3_bucket .Values.s3_prefix | trimSuffix "/" | replace "$" "$$" -}}
{{- $args := list "-m" "maskfleet" "data" "stage" $source (include "stage-data.folder" .) -}}
{{- $args = concat $args (list "--workers" (.Values.workers | int | toString)) -}}
{{- if .Values.check -}}{{- $args = append $args "--check" -}}{{- end -}}
{{- $args | toJson -}}
{{- end -}}
{{- end -}}
