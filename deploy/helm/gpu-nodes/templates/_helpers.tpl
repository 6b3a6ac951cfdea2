{{- define "gpu-nodes.labels" -}}
app.kubernetes.io/name: maskfleet-gpu-nodes
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The pools to create, as YAML {pools: [{name, zones, …}]}: <release> and <release>-efa. */}}
{{- define "gpu-nodes.pools" -}}
{{- $pools := list -}}
{{- if .Values.general.enabled -}}
{{- $pools = append $pools (merge (dict "name" .Release.Name) (omit .Values.general "enabled")) -}}
{{- end -}}
{{- if .Values.efa_az -}}
{{- $efa := dict "name" (printf "%s-efa" .Release.Name) "zones" (list .Values.efa_az) -}}
{{- $pools = append $pools (merge $efa .Values.efa) -}}
{{- end -}}
{{- toYaml (dict "pools" $pools) -}}
{{- end -}}
