{{- define "queues.labels" -}}
app.kubernetes.io/name: maskfleet-queues
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Kueue before 0.15 has v1beta1 only; the fields used here are the same in both. */}}
{{- define "queues.api" -}}
{{- $has := .Capabilities.APIVersions -}}
{{- if and ($has.Has "kueue.x-k8s.io/v1beta1") (not ($has.Has "kueue.x-k8s.io/v1beta2")) -}}
kueue.x-k8s.io/v1beta1
{{- else -}}
kueue.x-k8s.io/v1beta2
{{- end -}}
{{- end -}}

{{/* ClusterQueues and flavors have no namespace: their names begin with that of the release. */}}
{{- define "queues.clusterQueue" -}}
{{ .Values.cluster_queue | default (printf "%s-%s" .Release.Namespace .Values.queue) }}
{{- end -}}

{{- define "queues.flavor" -}}
{{- printf "%s-%s" (index . 0) (index . 1 | replace "." "-") -}}
{{- end -}}
