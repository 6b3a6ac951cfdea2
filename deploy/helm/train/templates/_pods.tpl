{{/* Security context of every container. */}}
{{- define "train.container.security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsGroup: 1000
runAsNonRoot: true
runAsUser: 1000
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* What both kinds of pod have in common. */}}
{{- define "train.pod.common" -}}
{{- $facts := include "train.facts" . | fromJson -}}
serviceAccountName: {{ $facts.service_account }}
automountServiceAccountToken: false
enableServiceLinks: false
hostNetwork: false
hostPID: false
hostIPC: false
{{- with .Values.priority_class }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image_pull_secrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
terminationGracePeriodSeconds: {{ int .Values.grace_s }}
securityContext:
  fsGroup: 1000
  # A chown of every file of a shared volume would take hours.
  fsGroupChangePolicy: OnRootMismatch
  runAsGroup: 1000
  runAsNonRoot: true
  runAsUser: 1000
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "train.pod.annotations" -}}
{{- if not .Values.min_nodes }}
karpenter.sh/do-not-disrupt: "true"
{{- end }}
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
sidecar.istio.io/inject: "false"
{{- end -}}

{{/* Volumes of both kinds of pod: our files, and a writable folder beside the read-only image. */}}
{{- define "train.pod.volumes" -}}
{{- if or .Values.run_yaml (not .Values.min_nodes) }}
- name: maskfleet
  projected:
    defaultMode: 292 # 0444
    sources:
      {{- if not .Values.min_nodes }}
      - configMap:
          name: {{ .Release.Name }}-files
      {{- end }}
      {{- if .Values.run_yaml }}
      - configMap:
          name: {{ .Release.Name }}-run
      {{- end }}
{{- end }}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "train.pod.mounts" -}}
{{- if or .Values.run_yaml (not .Values.min_nodes) }}
- name: maskfleet
  mountPath: /etc/maskfleet
  readOnly: true
{{- end }}
- name: home
  mountPath: /home/fleet
- name: tmp
  mountPath: /tmp
{{- end -}}

{{/* A command of pod.py as a JSON list. */}}
{{- define "train.pod.py" -}}
{{- concat (list "python3" "-I" "/etc/maskfleet/pod.py") . | toJson -}}
{{- end -}}

{{/* Nodes that are not Spot, from Karpenter or a node group; a missing label does not exclude a node. */}}
{{- define "train.on-demand" -}}
- key: karpenter.sh/capacity-type
  operator: NotIn
  values: [spot]
- key: eks.amazonaws.com/capacityType
  operator: NotIn
  values: [SPOT]
{{- end -}}

{{- define "train.launcher.resources" -}}
requests:
  cpu: {{ .Values.launcher_cpu | toString | quote }}
  memory: {{ .Values.launcher_memory }}
limits:
  cpu: {{ .Values.launcher_cpu | toString | quote }}
  memory: {{ .Values.launcher_memory }}
{{- end -}}
