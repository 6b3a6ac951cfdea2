{{/* Labels of every object of a release. */}}
{{- define "train.labels" -}}
{{ include "train.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that never change in the life of a release. */}}
{{- define "train.selector" -}}
app.kubernetes.io/name: maskfleet-train
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
