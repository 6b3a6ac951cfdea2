{{/* Labels of every object of a release. */}}
{{- define "storage.labels" -}}
app.kubernetes.io/name: maskfleet-storage
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Volumes have no namespace: two releases, or two namespaces, must not meet in one. */}}
{{- define "storage.volume" -}}
{{- printf "%s-%s-%s" .root.Release.Namespace .root.Release.Name .kind -}}
{{- end -}}

{{/*
A volume and its claim, bound to each other; `helm uninstall` keeps both. Needs root, kind, values, csi, options.

After its claim was deleted, as with its namespace, a volume keeps the uid of that claim and takes no other: a hook then
makes it again. The data is not touched. A uid in the manifest itself would unbind the volume at the next upgrade or
rollback.
*/}}
{{- define "storage.pair" -}}
{{- $old := lookup "v1" "PersistentVolume" "" (include "storage.volume" .) | default dict }}
{{- if eq (dig "status" "phase" "" $old) "Released" }}
{{- $hook := dict "helm.sh/hook" "pre-install,pre-upgrade" "helm.sh/hook-delete-policy" "before-hook-creation" }}
{{ include "storage.pv" (merge (dict "annotations" $hook) .) }}
---
{{- end }}
{{ include "storage.pv" . }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .values.claim | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "storage.labels" .root | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: {{ include "storage.volume" . | quote }}
  resources:
    requests:
      storage: {{ .values.capacity }}
{{- end -}}

{{/* The volume of a pair; also needs annotations if it is a hook. */}}
{{- define "storage.pv" -}}
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{ include "storage.volume" . | quote }}
  labels:
    {{- include "storage.labels" .root | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
    {{- with .annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  capacity:
    storage: {{ .values.capacity }}
  volumeMode: Filesystem
  accessModes: [ReadWriteMany]
  persistentVolumeReclaimPolicy: Retain
  # No class: nothing may be provisioned for the claim, and no default class may slip in.
  storageClassName: ""
  {{- with .options }}
  mountOptions:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  claimRef:
    apiVersion: v1
    kind: PersistentVolumeClaim
    namespace: {{ .root.Release.Namespace | quote }}
    name: {{ .values.claim | quote }}
  csi:
    {{- toYaml .csi | nindent 4 }}
{{- end -}}
