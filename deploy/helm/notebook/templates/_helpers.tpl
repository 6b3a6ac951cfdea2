{{- define "notebook.selector" -}}
app.kubernetes.io/name: maskfleet-notebook
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "notebook.labels" -}}
{{ include "notebook.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: maskfleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "notebook.loginSecret" -}}
{{ .Values.existing_secret | default (printf "%s-login" .Release.Name) }}
{{- end }}

{{- define "notebook.tlsSecret" -}}
{{ .Values.tls.existing_secret | default (printf "%s-tls" .Release.Name) }}
{{- end }}

{{- define "notebook.sources" -}}
{{- if kindIs "slice" .Values.source_cidr }}{{ toJson .Values.source_cidr }}
{{- else if .Values.source_cidr }}{{ toJson (list .Values.source_cidr) }}
{{- else }}[]
{{- end }}
{{- end }}

{{- define "notebook.hosts" -}}
{{- $service := printf "%s.%s.svc" .Release.Name .Release.Namespace -}}
{{ toJson (concat (list "localhost" "127.0.0.1" .Release.Name $service) .Values.tls.hosts | uniq) }}
{{- end }}

{{- /* Browsers keep cookies by host and not by port: releases forwarded to one laptop need names of their own. */ -}}
{{- define "notebook.cookie" -}}
maskfleet_{{ .Release.Name | replace "-" "_" | replace "." "_" }}
{{- end }}

{{- /* Values that are only valid, or only safe, together. An option skips the schema, but not this. */ -}}
{{- define "notebook.check" -}}
{{- if gt (len .Release.Name) 40 }}
{{- fail (printf "Release.Name: %q has %d characters; at most 40 fit" .Release.Name (len .Release.Name)) }}
{{- end }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}
{{- fail (printf "Release.Name: %q begins with a digit or has a dot, which the name of a Service must not" .Release.Name) }}
{{- end }}
{{- if not .Values.image }}
{{- fail "image: give the image made from deploy/docker/notebook" }}
{{- end }}
{{- if and (not .Values.htpasswd) (not .Values.existing_secret) }}
{{- fail "htpasswd: give the bcrypt hash of a password, or existing_secret" }}
{{- end }}
{{- if and .Values.htpasswd .Values.existing_secret }}
{{- fail "existing_secret: htpasswd is given too; set only one of them" }}
{{- end }}
{{- if and .Values.htpasswd (not (regexMatch "^[$]2[aby][$]1[0-5][$][./A-Za-z0-9]{53}$" .Values.htpasswd)) }}
{{- fail "htpasswd: not a bcrypt hash of cost 10 to 15" }}
{{- end }}
{{- range include "notebook.sources" . | fromJsonArray }}
{{- $bits := regexFind "[0-9]+$" . | int }}
{{- $least := contains ":" . | ternary 32 8 }}
{{- if or (not (contains "/" .)) (lt $bits $least) }}
{{- fail (printf "source_cidr: %s opens the notebook to too many; name at least a /%d" . $least) }}
{{- end }}
{{- end }}
{{- if and .Values.tls.existing_secret .Values.tls.issuer }}
{{- fail "tls.issuer: tls.existing_secret is given too; set only one of them" }}
{{- end }}
{{- if ne (empty .Values.data_fs) (empty .Values.data_pvc) }}
{{- fail "data_pvc: data_fs and data_pvc belong together; set both or none" }}
{{- end }}
{{- if and .Values.data_fs (eq .Values.data_fs .Values.shared_fs) }}
{{- fail (printf "data_fs: /%s is the shared volume already; leave data_fs empty" .Values.data_fs) }}
{{- end }}
{{- $taken := list "bin" "boot" "dev" "etc" "home" "lib" "lib64" "opt" "proc" "root" "run" "sbin" "srv" "sys" "tmp" "usr" "var" "work" }}
{{- range $field := list "shared_fs" "data_fs" }}
{{- if has (get $.Values $field) $taken }}
{{- fail (printf "%s: /%s is a folder of the image; choose another name" $field (get $.Values $field)) }}
{{- end }}
{{- end }}
{{- if gt (.Values.jupyter.cpu | float64) (.Values.jupyter.cpu_limit | float64) }}
{{- fail "jupyter.cpu_limit: less than jupyter.cpu" }}
{{- end }}
{{- end }}
