{{/* What a worker is, in an MPIJob and in an Indexed Job. */}}
{{- define "train.worker.placement" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- with $v.gpu_instance_type }}
nodeSelector:
  node.kubernetes.io/instance-type: {{ . }}
{{- end }}
tolerations:
  - key: nvidia.com/gpu
    operator: Exists
    effect: NoSchedule
  {{- with $v.worker_tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if ne $facts.zone "any" }}
affinity:
  podAffinity:
    {{- if eq $facts.zone "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: topology.kubernetes.io/zone
        labelSelector:
          matchLabels:
            {{- include "train.selector" . | nindent 12 }}
            app.kubernetes.io/component: worker
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels:
              {{- include "train.selector" . | nindent 14 }}
              app.kubernetes.io/component: worker
    {{- end }}
{{- end }}
{{- end -}}

{{- define "train.worker.resources" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
  cpu: {{ int $facts.cpus | toString | quote }}
  memory: {{ int $facts.memory_gib }}Gi
  {{- if gt (int $facts.gpus) 0 }}
  nvidia.com/gpu: {{ int $facts.gpus | toString | quote }}
  {{- end }}
  {{- if gt (int $facts.efa) 0 }}
  vpc.amazonaws.com/efa: {{ int $facts.efa | toString | quote }}
  {{- end }}
  {{- if gt (int $v.hugepages_2mi_mib) 0 }}
  hugepages-2Mi: {{ int $v.hugepages_2mi_mib }}Mi
  {{- end }}
{{- end }}
{{- end -}}

{{- define "train.worker.mounts" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{ include "train.pod.mounts" . | trim }}
- name: shm
  mountPath: /dev/shm
- name: shared
  mountPath: /{{ $v.shared_fs }}
{{- if $facts.own_data }}
- name: data
  mountPath: /{{ $facts.data_fs }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "train.worker.volumes" -}}
{{- $v := .Values -}}
{{- $facts := include "train.facts" . | fromJson -}}
{{ include "train.pod.volumes" . | trim }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ int $facts.shm_mib }}Mi
- name: shared
  persistentVolumeClaim:
    claimName: {{ $v.shared_pvc }}
{{- if $facts.own_data }}
- name: data
  persistentVolumeClaim:
    claimName: {{ $v.data_pvc }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* Label that holds the number of a worker. */}}
{{- define "train.worker.index" -}}
{{- ternary "batch.kubernetes.io/job-completion-index" "training.kubeflow.org/replica-index" (gt (int .Values.min_nodes) 0) -}}
{{- end -}}

{{/* What offers the run's metrics, beside a worker. */}}
{{- define "train.worker.metrics" -}}
{{- $v := .Values -}}
- name: metrics
  image: {{ $v.image | quote }}
  imagePullPolicy: {{ $v.image_pull_policy }}
  command: {{ include "train.exporter" . }}
  {{- if $v.min_nodes }}
  # As an init container that stays: it ends with the worker, so that the pod can succeed.
  restartPolicy: Always
  {{- end }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    - name: REPLICA_INDEX
      valueFrom:
        fieldRef:
          fieldPath: metadata.labels['{{ include "train.worker.index" . }}']
  securityContext:
    {{- include "train.container.security" . | nindent 4 }}
  ports:
    - name: metrics
      containerPort: {{ int $v.metrics_port }}
      protocol: TCP
  resources:
    {{- range $kind := list "requests" "limits" }}
    {{ $kind }}: {cpu: 50m, memory: 128Mi}
    {{- end }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: shared
      mountPath: /{{ $v.shared_fs }}
      readOnly: true
{{- end -}}
