{{- define "notebook.container" -}}
image: {{ .Values.image | quote }}
imagePullPolicy: {{ .Values.image_pull_policy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- /* By its own connection: the kubelet can connect neither to Jupyter's socket nor to TensorBoard's port. */ -}}
{{- define "notebook.alive" -}}
startupProbe:
  {{- include "notebook.connects" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
readinessProbe:
  {{- include "notebook.connects" . | nindent 2 }}
  periodSeconds: 15
  timeoutSeconds: 10
livenessProbe:
  {{- include "notebook.connects" . | nindent 2 }}
  periodSeconds: 60
  timeoutSeconds: 20
{{- end }}

{{- define "notebook.connects" -}}
{{- $root := index . 0 -}}
exec:
  command: ["python3", "-IS", {{ printf "%s/jupyter/alive.py" $root.Values.proxy.config_dir | quote }}, {{ index . 1 | quote }}]
{{- end }}

{{- define "notebook.readMounts" -}}
- {name: shared, mountPath: /{{ .Values.shared_fs }}, readOnly: true}
{{- if .Values.data_fs }}
- {name: data, mountPath: /{{ .Values.data_fs }}, readOnly: true}
{{- end }}
{{- end }}
