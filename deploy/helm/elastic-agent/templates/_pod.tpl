{{/* The pod of an agent, the same in all modes. */}}
{{- define "elastic-agent.pod" -}}
{{- $name := include "elastic-agent.fullname" . -}}
{{- $values := .Values -}}
metadata:
  labels:
    {{- include "elastic-agent.labels" . | nindent 4 }}
    app.kubernetes.io/component: agent
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- if ne $values.mode "job" }}
    # A changed configuration replaces the pods.
    checksum/config: {{ include "elastic-agent.toml" . | sha256sum }}
    {{- end }}
    {{- if $values.metrics.annotations }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $values.metrics.port | quote }}
    prometheus.io/path: /metrics
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # The agent asks nothing of Kubernetes.
  automountServiceAccountToken: false
  # A variable for each Service would be taken for a misspelt option of the agent, should one be called elastic-agent.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "elastic-agent.stop-limit" . }}
  {{- if eq $values.mode "job" }}
  restartPolicy: Never
  subdomain: {{ $name }}
  {{- end }}
  {{- if $values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- include "elastic-agent.pod-security" . | nindent 4 }}
  containers:
    - name: agent
      image: {{ printf "%s:%s" $values.image.repository ($values.image.tag | default .Chart.AppVersion) | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq $values.mode "pool" }}
      args: ["--min-nodes", "{{ $values.nodes.min }}", "--max-nodes", "{{ $values.nodes.max }}"]
      {{- end }}
      env:
        - name: ELASTIC_AGENT_CONFIG
          value: /etc/elastic-agent/agent.toml
        {{- if eq $values.mode "job" }}
        - name: POD_INDEX
          valueFrom:
            fieldRef:
              fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
        - name: ELASTIC_AGENT_NODE_ID
          value: {{ $name }}-$(POD_INDEX)
        {{- else }}
        - name: ELASTIC_AGENT_NODE_ID
          valueFrom:
            fieldRef:
              fieldPath: spec.nodeName
        {{- end }}
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: ELASTIC_AGENT_HTTP_ADDRESS
          value: "{{ $values.ipv6 | ternary "[$(POD_IP)]" "$(POD_IP)" }}:{{ $values.metrics.port }}"
        {{- range $variable, $text := $values.env }}
        - name: {{ $variable }}
          value: {{ $text | quote }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: http
          containerPort: {{ $values.metrics.port }}
      # The agent answers these as soon as it has a network, long before it has found its store, and /healthz never says
      # anything about the store: its outage is no reason to restart pods.
      startupProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 5
        failureThreshold: {{ add 24 (div $values.joinTimeoutSeconds 5) }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
        # A pod that does not answer for so long does not stop in order, either.
        terminationGracePeriodSeconds: 5
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      resources:
        {{- include "elastic-agent.resources" . | nindent 8 }}
      securityContext:
        {{- include "elastic-agent.container-security" . | nindent 8 }}
        capabilities:
          drop: [ALL]
          {{- if $values.rdma.ipcLock }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/elastic-agent
          readOnly: true
        - name: tmp
          mountPath: /tmp
        - name: shared-memory
          mountPath: /dev/shm
        {{- if $values.logSize }}
        - name: logs
          mountPath: /var/log/elastic-agent
        {{- end }}
        {{- with $values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      projected:
        defaultMode: 0400
        sources:
          - configMap:
              name: {{ $name }}
          {{- with $values.etcd.tls.secretName }}
          - secret:
              name: {{ . }}
              items:
                - {key: ca.crt, path: tls/ca.crt}
                {{- if $values.etcd.tls.clientCertificate }}
                - {key: tls.crt, path: tls/tls.crt}
                - {key: tls.key, path: tls/tls.key}
                {{- end }}
          {{- end }}
          {{- with $values.etcd.auth.secretName }}
          - secret:
              name: {{ . }}
              items:
                - {key: password, path: password/password}
          {{- end }}
    - name: tmp
      emptyDir:
        {{- with $values.tmpSize }}
        sizeLimit: {{ . }}
        {{- else }} {}
        {{- end }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $values.sharedMemory }}
    {{- with $values.logSize }}
    - name: logs
      emptyDir:
        sizeLimit: {{ . }}
    {{- end }}
    {{- with $values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "imagePullSecrets" }}
  {{- with index $values $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" }}
  {{- with index $values $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "elastic-agent.pod-security" -}}
runAsUser: {{ .Values.securityContext.runAsUser }}
runAsGroup: {{ .Values.securityContext.runAsGroup }}
{{- if .Values.securityContext.runAsUser }}
runAsNonRoot: true
# What is mounted belongs to root, who lends it to this group. Root needs no loan, and the agent refuses keys that others
# than their owner can read for no reason.
fsGroup: {{ .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "elastic-agent.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end -}}

{{/* Devices are requested by their limit. */}}
{{- define "elastic-agent.resources" -}}
{{- $devices := dict -}}
{{- if .Values.gpu.count }}{{ $_ := set $devices .Values.gpu.resource .Values.gpu.count }}{{ end -}}
{{- if .Values.rdma.resource }}{{ $_ := set $devices .Values.rdma.resource .Values.rdma.count }}{{ end -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml (merge $devices .Values.resources.limits) | nindent 2 }}
{{- end -}}
