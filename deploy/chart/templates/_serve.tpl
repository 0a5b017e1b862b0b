{{/* The Serve file of the application: the same that `serve deploy` takes, with `args` as cluster.app accepts them. */}}
{{- define "epdg.serveConfig" -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
logging_config: {log_level: WARNING, enable_access_log: false}
applications:
  - name: epdg
    route_prefix: /
    import_path: cluster.app:build
    args:
      {{- include "epdg.args" . | fromJson | toYaml | nindent 6 }}
    deployments:
      {{- range include "epdg.roles" . | fromJsonArray }}
      {{- $of := dict "root" $ "role" . }}
      {{- $host := include "epdg.hostRole" $of }}
      {{- $pool := include "epdg.pool" $of | fromJson }}
      {{- $owner := include "epdg.pool" (dict "root" $ "role" $host) | fromJson }}
      - name: {{ . | replace "_" " " | title | nospace }}
        num_replicas: {{ mul (int $owner.pods) (int $pool.workersPerPod) }}
        max_replicas_per_node: {{ $pool.workersPerPod }}
        ray_actor_options:
          {{- if eq $.Values.device "cuda" }}
          num_cpus: 1
          num_gpus: {{ include "epdg.workerGpus" $of }}
          {{- else }}
          num_cpus: 0
          {{- end }}
          label_selector: {pool: {{ $host }}}
      {{- end }}
      - name: Door
        num_replicas: {{ .Values.doors.pods }}
        max_replicas_per_node: 1
        ray_actor_options:
          num_cpus: 1
          label_selector: {pool: door}
{{- end }}

{{/* What this chart decides, over `settings`. */}}
{{- define "epdg.args" -}}
{{- $args := deepCopy .Values.settings -}}
{{- $roles := include "epdg.roles" . | fromJsonArray -}}
{{- $_ := set $args "model" (include "epdg.modelPath" .) -}}
{{- with .Values.checkpoint.servedName }}{{ $_ := set $args "model_id" . }}{{ end -}}
{{- if and (eq .Values.checkpoint.source "hub") (not .Values.checkpoint.servedName) -}}
{{- $_ := set $args "model_id" .Values.checkpoint.hub.id -}}
{{- end -}}
{{- $_ := set $args "device" .Values.device -}}
{{- $_ := set $args "roles" $roles -}}
{{- $_ := set $args "tensor_parallel_size" (int .Values.tensorParallelSize) -}}
{{- $_ := set $args "side_channel" "tcp" -}}
{{- $_ := set $args "transfer" (mergeOverwrite (default dict $args.transfer) (dict "net_devices" .Values.network.devices)) -}}
{{- $door := default dict $args.door -}}
{{- $_ := set $door "admission" (mergeOverwrite (default dict $door.admission) (dict "num_doors" (int .Values.doors.pods))) -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $file := printf "%s/%s" (include "epdg.keyFolder" .) .Values.apiKeys.key -}}
{{- $_ := set $door "access" (mergeOverwrite (default dict $door.access) (dict "key_file" $file)) -}}
{{- end -}}
{{- $_ := set $args "door" $door -}}
{{- if eq .Values.device "cpu" -}}
{{- range $roles -}}
{{- $threads := include "epdg.cpuThreads" (dict "root" $ "role" .) | int -}}
{{- $own := default dict (index $args .) -}}
{{- if and $threads (not (hasKey $own "threads")) -}}
{{- $_ := set $args . (mergeOverwrite $own (dict "threads" $threads)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $args | toJson -}}
{{- end }}

{{/* Threads of a CPU worker: its share of the pod's limit. Without it the worker would count the cores of the whole host.
     0: the limit is no whole number of cores. */}}
{{- define "epdg.cpuThreads" -}}
{{- $host := include "epdg.pool" (dict "root" .root "role" (include "epdg.hostRole" .)) | fromJson -}}
{{- $cpu := toString (default "" (default dict $host.resources.limits).cpu) -}}
{{- if regexMatch "^[0-9]+$" $cpu -}}
{{- $workers := 0 -}}
{{- $hostRole := include "epdg.hostRole" . -}}
{{- range include "epdg.roles" .root | fromJsonArray -}}
{{- $of := dict "root" $.root "role" . -}}
{{- if eq (include "epdg.hostRole" $of) $hostRole -}}
{{- $workers = add $workers (int (include "epdg.pool" $of | fromJson).workersPerPod) -}}
{{- end -}}
{{- end -}}
{{- max 1 (div (int $cpu) $workers) -}}
{{- else -}}0
{{- end -}}
{{- end }}

{{- define "epdg.modelPath" -}}
{{- if eq .Values.checkpoint.source "hub" -}}/models/hub
{{- else if eq .Values.checkpoint.source "claim" -}}
{{ printf "%s/%s" (trimSuffix "/" .Values.checkpoint.claim.mountPath) .Values.checkpoint.path | trimSuffix "/" }}
{{- else -}}{{ .Values.checkpoint.path }}
{{- end -}}
{{- end }}
