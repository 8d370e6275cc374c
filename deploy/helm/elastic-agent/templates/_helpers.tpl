{{/* The name of everything in this release. Pods of a Job add an index to it, and the agents' names have 64 characters. */}}
{{- define "elastic-agent.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "elastic-agent.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "elastic-agent.names" . }}
{{- end -}}

{{- define "elastic-agent.names" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Which pods are agents of this job. */}}
{{- define "elastic-agent.agents" -}}
{{ include "elastic-agent.names" . }}
app.kubernetes.io/component: agent
{{- end -}}

{{- define "elastic-agent.etcd" -}}
{{ include "elastic-agent.names" . }}
app.kubernetes.io/component: etcd
{{- end -}}

{{/* Not empty: the nodes meet in etcd. */}}
{{- define "elastic-agent.meets-in-etcd" -}}
{{- if or .Values.etcd.deploy .Values.etcd.endpoints -}}true{{- end -}}
{{- end -}}

{{/* What --rdzv-endpoint says. */}}
{{- define "elastic-agent.endpoint" -}}
{{- $name := include "elastic-agent.fullname" . -}}
{{- if .Values.etcd.deploy -}}
etcd://{{ $name }}-etcd:2379{{ .Values.etcd.prefix }}
{{- else if .Values.etcd.endpoints -}}
etcd://{{ join "," .Values.etcd.endpoints }}{{ .Values.etcd.prefix }}
{{- else -}}
{{ .Values.c10d.endpoint | default (printf "%s-0.%s:%v" $name $name .Values.c10d.port) }}
{{- end -}}
{{- end -}}

{{/* From SIGTERM to SIGKILL of the pod. Beside the workers' grace an agent takes as long again, or 10 s, where it has to
     bring to disk what no other node has in memory, and up to 5 s to leave the job; the one that keeps the store stays
     15 s more, so that the others hear how the job has ended. */}}
{{- define "elastic-agent.stop-limit" -}}
{{ add .Values.stopGraceSeconds (max 10 .Values.stopGraceSeconds) 20 }}
{{- end -}}

{{- define "elastic-agent.devices-per-worker" -}}
{{ index .Values.config "devices-per-worker" | default (index .Values.config "devices_per_worker") | default 1 }}
{{- end -}}

{{/* The options that this chart sets, as a table in TOML; a JSON value is one of TOML, too. */}}
{{- define "elastic-agent.toml" -}}
{{- $values := .Values -}}
{{- $workers := div ($values.gpu.count | default 1) (include "elastic-agent.devices-per-worker" . | int) | max 1 -}}
{{- $options := dict
      "nproc-per-node" ($values.workersPerNode | default $workers)
      "rdzv-endpoint" (include "elastic-agent.endpoint" .)
      "join-timeout" $values.joinTimeoutSeconds
      "stop-grace" $values.stopGraceSeconds
-}}
{{- $name := $values.jobId | default (include "elastic-agent.fullname" .) -}}
{{- if eq $values.mode "pool" -}}
{{- $_ := set $options "pool" $name -}}
{{- else -}}
{{- $own := dict "args" $values.run.args "min-nodes" $values.nodes.min "max-nodes" $values.nodes.max "rdzv-id" $name -}}
{{- $options = merge $options $own -}}
{{- end -}}
{{- range $value, $option := dict "script" "script" "module" "module" "program" "no-python" -}}
{{- with index $values.run $value }}{{ $_ := set $options $option . }}{{ end -}}
{{- end -}}
{{- if $values.logSize }}{{ $_ := set $options "log-dir" "/var/log/elastic-agent" }}{{ end -}}
{{- if include "elastic-agent.meets-in-etcd" . -}}
{{- if $values.etcd.insecure }}{{ $_ := set $options "etcd-insecure" true }}{{ end -}}
{{- if $values.etcd.tls.secretName -}}
{{- $_ := set $options "etcd-ca" "/etc/elastic-agent/tls/ca.crt" -}}
{{- if $values.etcd.tls.clientCertificate -}}
{{- $_ := set $options "etcd-cert" "/etc/elastic-agent/tls/tls.crt" -}}
{{- $_ := set $options "etcd-key" "/etc/elastic-agent/tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if $values.etcd.auth.user -}}
{{- $_ := set $options "etcd-user" $values.etcd.auth.user -}}
{{- $_ := set $options "etcd-password-file" "/etc/elastic-agent/password/password" -}}
{{- end -}}
{{- end -}}
{{- range $given, $value := $values.config -}}
{{- $option := replace "_" "-" $given -}}
{{- if or (hasKey $options $option) (has $option (list "args" "min-nodes" "max-nodes" "rdzv-id" "pool" "script" "module" "no-python" "nnodes" "rdzv-backend" "node-id" "http-address" "log-dir" "config" "standalone")) (hasPrefix "etcd-" $option) -}}
{{- fail (printf "config.%s: the chart sets this option itself; see the values run, nodes, workersPerNode, jobId, stopGraceSeconds, joinTimeoutSeconds, c10d, etcd, metrics and logSize" $given) -}}
{{- end -}}
{{- $_ := set $options $option $value -}}
{{- end -}}
{{- range $option, $value := $options }}
{{ $option }} = {{ toJson $value }}
{{- end }}
{{- end -}}
