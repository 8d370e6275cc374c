{{/* What the schema cannot say: values that are each right, and contradict each other. */}}
{{- define "elastic-agent.check" -}}
{{- $values := .Values -}}
{{- $etcd := $values.etcd -}}
{{- $targets := list -}}
{{- range list "script" "module" "program" -}}
{{- if index $values.run . }}{{ $targets = append $targets (printf "run.%s" .) }}{{ end -}}
{{- end -}}
{{- if eq $values.mode "pool" -}}
{{- if $values.run.args }}{{ $targets = append $targets "run.args" }}{{ end -}}
{{- with $targets -}}
{{- fail (printf "mode pool: its jobs are submitted when it runs, so %s has no meaning: leave it out" (join " and " .)) -}}
{{- end -}}
{{- if not (include "elastic-agent.meets-in-etcd" .) -}}
{{- fail "mode pool: where do the nodes meet? Set etcd.endpoints, or etcd.deploy=true to try it out" -}}
{{- end -}}
{{- else if ne (len $targets) 1 -}}
{{- fail (printf "what should the workers run? Set one of run.script, run.module and run.program; %s" (empty $targets | ternary "none is set" (printf "set are %s" (join " and " $targets)))) -}}
{{- end -}}
{{- if gt (int $values.nodes.min) (int $values.nodes.max) -}}
{{- fail (printf "nodes.min is %v, more than nodes.max, which is %v" $values.nodes.min $values.nodes.max) -}}
{{- end -}}

{{- $each := include "elastic-agent.devices-per-worker" . | int -}}
{{- if and $values.gpu.count (not $values.workersPerNode) (mod $values.gpu.count $each) -}}
{{- fail (printf "gpu.count is %v, which config.devices-per-worker, %v, does not divide: correct one of them, or set workersPerNode to leave the rest idle" $values.gpu.count $each) -}}
{{- end -}}

{{- if and $etcd.deploy $etcd.endpoints -}}
{{- fail "etcd.deploy makes an etcd, and etcd.endpoints names another: keep one of them" -}}
{{- end -}}
{{- if include "elastic-agent.meets-in-etcd" . -}}
{{- if $values.c10d.endpoint -}}
{{- fail (printf "c10d.endpoint is %s, but the nodes meet in etcd (etcd.endpoints, etcd.deploy): keep one of them" $values.c10d.endpoint) -}}
{{- end -}}
{{- if eq (empty $etcd.tls.secretName) (not $etcd.insecure) -}}
{{- fail "etcd: set either etcd.tls.secretName, or etcd.insecure=true to send everything as plain text" -}}
{{- end -}}
{{- if ne (empty $etcd.auth.user) (empty $etcd.auth.secretName) -}}
{{- fail "etcd.auth.user and etcd.auth.secretName (a Secret with the key password) belong together: set both or none" -}}
{{- end -}}
{{- if and $etcd.deploy (ne (empty $etcd.tls.secretName) (empty $etcd.tls.serverSecretName)) -}}
{{- fail "etcd.deploy with TLS needs two Secrets: etcd.tls.secretName for the agents and etcd.tls.serverSecretName for etcd" -}}
{{- end -}}
{{- if and $etcd.deploy $etcd.auth.user -}}
{{- fail "etcd.auth.user: the etcd of etcd.deploy knows no users" -}}
{{- end -}}
{{- else -}}
{{- if or $etcd.insecure $etcd.prefix $etcd.tls.secretName $etcd.auth.user -}}
{{- fail "etcd.insecure, etcd.prefix, etcd.tls and etcd.auth say how to reach an etcd, but there is none: set etcd.endpoints" -}}
{{- end -}}
{{- if and (eq $values.mode "daemonset") (not $values.c10d.endpoint) -}}
{{- fail "mode daemonset: where do the nodes meet? Set etcd.endpoints, or etcd.deploy=true to try it out; or, with hostNetwork, c10d.endpoint=HOST:PORT of the node that is to keep the store" -}}
{{- end -}}
{{- if and $values.c10d.endpoint (not $values.hostNetwork) -}}
{{- fail "c10d.endpoint names a node, which the pods' own network does not have: set hostNetwork=true, or leave it out" -}}
{{- end -}}
{{- end -}}

{{- if and $values.hostNetwork $values.networkPolicy.enabled -}}
{{- fail "hostNetwork: a NetworkPolicy does not hold for pods on the nodes' network; set networkPolicy.enabled=false, and guard the nodes' ports by other means" -}}
{{- end -}}
{{- if ne (eq (int $values.securityContext.runAsUser) 0) $values.rdma.ipcLock -}}
{{- fail "securityContext.runAsUser=0 and rdma.ipcLock=true need each other: only root gets a capability in Kubernetes, and nothing else here needs root" -}}
{{- end -}}
{{- range $name := list "ELASTIC_AGENT_CONFIG" "ELASTIC_AGENT_NODE_ID" "ELASTIC_AGENT_HTTP_ADDRESS" -}}
{{- if hasKey $values.env $name }}{{ fail (printf "env.%s: the chart sets this variable itself" $name) }}{{ end -}}
{{- end -}}
{{- end -}}
