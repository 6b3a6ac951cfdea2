{{- define "mpi-operator.labels" -}}
app.kubernetes.io/name: maskfleet-mpi-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "mpi-operator.selector" -}}
app.kubernetes.io/name: maskfleet-mpi-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "mpi-operator.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "mpi-operator.lockNamespace" -}}
{{ .Values.lock_namespace | default .Release.Namespace }}
{{- end -}}

{{/* Objects without a namespace carry the release's, so that two releases do not meet. */}}
{{- define "mpi-operator.clusterName" -}}
{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end -}}

{{/* What the operator calls, and nothing else: it reads through informers (list, watch), so it never needs get. */}}
{{- define "mpi-operator.rules" -}}
- apiGroups: [""]
  resources: [configmaps, secrets, services]
  verbs: [list, watch, create, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, update]
# A resumed launcher's start time is cleared before its pod template may change.
- apiGroups: [batch]
  resources: [jobs/status]
  verbs: [update]
- apiGroups: [kubeflow.org]
  resources: [mpijobs]
  verbs: [list, watch]
- apiGroups: [kubeflow.org]
  resources: [mpijobs/status]
  verbs: [update]
# Owner references that block deletion need this where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [kubeflow.org]
  resources: [mpijobs/finalizers]
  verbs: [update]
{{- end -}}
