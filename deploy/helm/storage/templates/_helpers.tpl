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

{{/* A volume and its claim, bound to each other; `helm uninstall` keeps both. Needs root, kind, values, csi, options. */}}
{{- define "storage.pair" -}}
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{ include "storage.volume" . | quote }}
  labels:
    {{- include "storage.labels" .root | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
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
