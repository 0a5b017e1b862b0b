{{/* Names and labels. KubeRay refuses a RayService whose name is longer than 47 characters. */}}
{{- define "epdg.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{/* Of the chart's objects. They name the chart's version, so they must not get into pod templates: a changed template
     makes KubeRay start a second cluster. */}}
{{- define "epdg.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Of all pods of the Ray cluster, and of no other pod. */}}
{{- define "epdg.nodeLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: {{ include "epdg.fullname" . }}
{{- end }}

{{- define "epdg.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "epdg.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "epdg.clusterSecretName" -}}
{{ default (printf "%s-cluster-secret" (include "epdg.fullname" .)) .Values.clusterSecret.existingSecret }}
{{- end }}

{{- define "epdg.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{/* Where KubeRay's Service of the proxies is. */}}
{{- define "epdg.serveService" -}}
{{ include "epdg.fullname" . }}-serve-svc
{{- end }}

{{/* Where doors see the file of API keys. A folder, because a single mounted file would not follow its Secret. */}}
{{- define "epdg.keyFolder" -}}
/etc/epdg/api-keys
{{- end }}

{{/* The roles in the order of the worker groups: KubeRay compares groups by their place. */}}
{{- define "epdg.roles" -}}
{{- $enabled := list -}}
{{- range list "encode" "prefill" "decode" "language" "encode_prefill" "whole" -}}
{{- if (index $.Values.pools .).enabled -}}{{- $enabled = append $enabled . -}}{{- end -}}
{{- end -}}
{{- $enabled | toJson -}}
{{- end }}

{{/* A pool with its defaults. Argument: dict "root" $ "role" "encode" */}}
{{- define "epdg.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy (index .root.Values.pools .role)) | toJson -}}
{{- end }}

{{/* The most pods that a pool's own group may have. Argument as above */}}
{{- define "epdg.maxPods" -}}
{{- $pool := include "epdg.pool" . | fromJson -}}
{{- $most := default $pool.pods $pool.maxPods | int -}}
{{- if lt $most (int $pool.pods) -}}
{{- fail (printf "pools.%s.maxPods: %d are fewer than its pods, %d" .role $most (int $pool.pods)) -}}
{{- end -}}
{{- $most -}}
{{- end }}

{{/* Of the groups that the load may make larger, the names; nothing: all pools are fixed. */}}
{{- define "epdg.scaledGroups" -}}
{{- range include "epdg.roles" . | fromJsonArray -}}
{{- $of := dict "root" $ "role" . -}}
{{- if eq (include "epdg.hostRole" $of) . -}}
{{- if gt (include "epdg.maxPods" $of | int) (int (include "epdg.pool" $of | fromJson).pods) -}}
{{ . }} {{ end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The role in whose pods a pool runs. */}}
{{- define "epdg.hostRole" -}}
{{- $pool := include "epdg.pool" . | fromJson -}}
{{- $host := default .role $pool.shareWith -}}
{{- if ne $host .role -}}
{{- $other := include "epdg.pool" (dict "root" .root "role" $host) | fromJson -}}
{{- if or (not $other.enabled) $other.shareWith -}}
{{- fail (printf "pools.%s.shareWith: %s must be an enabled pool with pods of its own" .role $host) -}}
{{- end -}}
{{- end -}}
{{- $host -}}
{{- end }}

{{/* GPUs of one worker, as deploy.app gives them to the replica. */}}
{{- define "epdg.workerGpus" -}}
{{- if ne .root.Values.device "cuda" -}}0
{{- else if eq .role "encode" -}}1
{{- else -}}{{ .root.Values.tensorParallelSize }}
{{- end -}}
{{- end }}

{{/* GPUs of one pod: those of all workers in it. */}}
{{- define "epdg.podGpus" -}}
{{- $sum := 0 -}}
{{- range include "epdg.roles" .root | fromJsonArray -}}
{{- $of := dict "root" $.root "role" . -}}
{{- if eq (include "epdg.hostRole" $of) $.role -}}
{{- $pool := include "epdg.pool" $of | fromJson -}}
{{- $sum = add $sum (mul (int $pool.workersPerPod) (include "epdg.workerGpus" $of | int)) -}}
{{- end -}}
{{- end -}}
{{- $sum -}}
{{- end }}

{{- define "epdg.groupName" -}}
{{- . | replace "_" "-" -}}
{{- end }}

{{/* What a pod of this pool claims with DRA, and the name of the template for it. A ResourceClaimTemplate cannot be changed, so
     another claim has another name. Old templates are not kept: `helm rollback` fails where an object of its target exists that
     the last release has not. Argument: dict "root" $ "role" "encode" */}}
{{- define "epdg.claimSpec" -}}
spec:
  devices:
    requests:
      - name: gpus
        exactly:
          deviceClassName: {{ .root.Values.gpu.deviceClassName }}
          allocationMode: ExactCount
          count: {{ include "epdg.podGpus" . }}
{{- end }}

{{- define "epdg.claimName" -}}
{{ include "epdg.fullname" .root }}-{{ include "epdg.groupName" .role }}-{{ include "epdg.claimSpec" . | sha256sum | trunc 8 }}
{{- end }}

{{/* The pods of the worker groups as a JSON patch of the running RayCluster. KubeRay leaves the three numbers of a group out of
     the hash by which it compares a RayService with its RayCluster, so it never applies a change of them. `test` refuses the
     patch where a group has another place. `replicas` of a group that the load scales is the autoscaler's. */}}
{{- define "epdg.countsPatch" -}}
{{- $groups := list (dict "name" "door" "least" .Values.doors.pods "most" .Values.doors.pods) -}}
{{- range include "epdg.roles" . | fromJsonArray -}}
{{- $of := dict "root" $ "role" . -}}
{{- if eq (include "epdg.hostRole" $of) . -}}
{{- $pods := (include "epdg.pool" $of | fromJson).pods -}}
{{- $groups = append $groups (dict "name" (include "epdg.groupName" .) "least" $pods "most" (include "epdg.maxPods" $of)) -}}
{{- end -}}
{{- end -}}
{{- $operations := list -}}
{{- range $place, $group := $groups -}}
{{- $path := printf "/spec/workerGroupSpecs/%d" $place -}}
{{- $least := int $group.least -}}
{{- $most := int $group.most -}}
{{- $operations = append $operations (dict "op" "test" "path" (printf "%s/groupName" $path) "value" $group.name) -}}
{{- if eq $least $most -}}
{{- $operations = append $operations (dict "op" "add" "path" (printf "%s/replicas" $path) "value" $least) -}}
{{- end -}}
{{- $operations = append $operations (dict "op" "add" "path" (printf "%s/minReplicas" $path) "value" $least) -}}
{{- $operations = append $operations (dict "op" "add" "path" (printf "%s/maxReplicas" $path) "value" $most) -}}
{{- end -}}
[
{{- range $place, $operation := $operations }}
  {{ toJson $operation }}{{ if lt (add1 $place) (len $operations) }},{{ end }}
{{- end }}
]
{{- end }}
