{{/* The Serve file of the application: the same that `serve deploy` takes, with `args` as deploy.app accepts them. */}}
{{- define "epdg.serveConfig" -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
logging_config: {log_level: WARNING, enable_access_log: false}
applications:
  - name: epdg
    route_prefix: /
    import_path: deploy.app:build
    {{- $isScaled := include "epdg.scaledGroups" . }}
    {{- if $isScaled }}
    {{- $scaling := .Values.scaling }}
    autoscaling_policy:
      policy_function: deploy.serving.scaling:ScalingPolicy
      policy_kwargs:
        target_ttft_s: {{ $scaling.targetTtftSeconds }}
        target_tpot_s: {{ $scaling.targetTpotSeconds }}
        start_s: {{ $scaling.startSeconds }}
        drain_s: {{ $scaling.drainSeconds }}
        max_workers: {{ $scaling.maxWorkers }}
    {{- end }}
    args:
      {{- include "epdg.args" . | fromJson | toYaml | nindent 6 }}
    deployments:
      {{- range include "epdg.roles" . | fromJsonArray }}
      {{- $of := dict "root" $ "role" . }}
      {{- $host := include "epdg.hostRole" $of }}
      {{- $pool := include "epdg.pool" $of | fromJson }}
      {{- $owner := dict "root" $ "role" $host }}
      {{- $least := mul (int (include "epdg.pool" $owner | fromJson).pods) (int $pool.workersPerPod) }}
      {{- $most := mul (include "epdg.maxPods" $owner | int) (int $pool.workersPerPod) }}
      - name: {{ . | replace "_" " " | title | nospace }}
        {{- if gt $most $least }}
        autoscaling_config: {{ include "epdg.scalingBounds" (list $least $most) }}
        {{- else }}
        num_replicas: {{ $least }}
        {{- end }}
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
        {{- if $isScaled }}
        autoscaling_config: {{ include "epdg.scalingBounds" (list .Values.doors.pods .Values.doors.pods) }}
        {{- else }}
        num_replicas: {{ .Values.doors.pods }}
        {{- end }}
        {{- if eq (int .Values.doors.pods) 1 }}
        {{- /* Its successor has no place before it has stopped, and no other door answers meanwhile. */}}
        graceful_shutdown_timeout_s: 20
        {{- end }}
        max_replicas_per_node: 1
        ray_actor_options:
          num_cpus: 1
          label_selector: {pool: door}
{{- end }}

{{/* The policy has delays of its own; doors, whose bounds are equal, tell it what arrives. */}}
{{- define "epdg.scalingBounds" -}}
{min_replicas: {{ index . 0 }}, max_replicas: {{ index . 1 }}, metrics_interval_s: 1, look_back_period_s: 2, upscale_delay_s: 0, downscale_delay_s: 0}
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
