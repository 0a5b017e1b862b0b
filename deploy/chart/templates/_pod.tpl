{{/* One pod template of the Ray cluster.
     Argument: dict "root" $ "component" "prefill" "role" "prefill" "pod" VALUES "gpus" 1 "rdma" true; `role`: with GPUs
     Nothing here may change with the chart's version: KubeRay starts a second cluster for a changed template. */}}
{{- define "epdg.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "epdg.nodeLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with .pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "epdg.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and (eq .component "head") (not (empty (include "epdg.scaledGroups" $root))) }}
  enableServiceLinks: false
  {{- if and .gpus $values.gpu.runtimeClassName }}
  runtimeClassName: {{ $values.gpu.runtimeClassName }}
  {{- end }}
  terminationGracePeriodSeconds: 60
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq $values.checkpoint.source "hub" }}
  initContainers:
    {{- include "epdg.downloadContainer" $root | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" (eq .component "head") }}
      image: {{ include "epdg.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "epdg.securityContext" . | nindent 8 }}
      ports:
        {{- include "epdg.ports" .component | nindent 8 }}
      env:
        {{- include "epdg.env" . | nindent 8 }}
      resources:
        {{- include "epdg.resources" . | fromJson | toYaml | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/epdg}
        - {name: shm, mountPath: /dev/shm}
        {{- if eq $values.checkpoint.source "claim" }}
        - {name: model, mountPath: {{ $values.checkpoint.claim.mountPath }}, readOnly: true}
        {{- else if eq $values.checkpoint.source "hub" }}
        - {name: model, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and (eq .component "door") $values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: {{ include "epdg.keyFolder" $root }}, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ default "1Gi" .pod.shmSize }}
    {{- if eq $values.checkpoint.source "claim" }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ required "checkpoint.claim.name: the PersistentVolumeClaim with the model" $values.checkpoint.claim.name }}
        readOnly: true
    {{- else if eq $values.checkpoint.source "hub" }}
    - name: model
      {{- toYaml $values.checkpoint.hub.volume | nindent 6 }}
    {{- end }}
    {{- if and (eq .component "door") $values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ $values.apiKeys.existingSecret }}
        defaultMode: 0440
    {{- end }}
  {{- if and .gpus (eq $values.gpu.allocation "dra") }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ include "epdg.claimName" (dict "root" $root "role" .role) }}
  {{- end }}
  {{- with .pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := .pod.tolerations }}
  {{- if .gpus }}
  {{- $tolerations = append $tolerations (dict "key" $values.gpu.resourceName "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end }}

{{/* RDMA locks the memory that it registers. An added capability counts for root alone: that of any other user is only in the
     bounding set, and without privilege escalation stays there. */}}
{{- define "epdg.locksAsRoot" -}}
{{- $rdma := .root.Values.network.rdma -}}
{{- if and .rdma $rdma.resources $rdma.asRoot }}true{{ end -}}
{{- end }}

{{- define "epdg.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if include "epdg.locksAsRoot" . -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK") -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- $_ := set $context "runAsUser" 0 -}}
{{- $_ := set $context "runAsNonRoot" false -}}
{{- end -}}
{{- toYaml $context -}}
{{- end }}

{{- define "epdg.ports" -}}
{{- if eq . "head" -}}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: as-metrics, containerPort: 44217}
- {name: dash-metrics, containerPort: 44227}
{{ end -}}
- {name: serve, containerPort: 8000}
- {name: metrics, containerPort: 8080}
{{- if eq . "door" }}
- {name: door-http, containerPort: 30000}
{{- end }}
{{- end }}

{{- define "epdg.env" -}}
{{- $values := .root.Values -}}
{{- $plain := mergeOverwrite (.root.Files.Get "files/environment.yaml" | fromYaml) (deepCopy $values.env) -}}
{{- /* root's own folder is on the image, which is read-only */}}
{{- if include "epdg.locksAsRoot" . }}{{ $_ := set $plain "HOME" "/home/epdg" }}{{ end -}}
{{- if .rdma }}{{ $plain = mergeOverwrite $plain (deepCopy $values.network.rdma.env) }}{{ end -}}
{{- $plain = mergeOverwrite $plain (deepCopy .pod.env) -}}
- name: EPDG_CLUSTER_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "epdg.clusterSecretName" .root }}
      key: {{ $values.clusterSecret.key }}
{{- range $name, $value := $plain }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* The values' requests and limits, with GPUs and RDMA devices. */}}
{{- define "epdg.resources" -}}
{{- $resources := deepCopy .pod.resources -}}
{{- $devices := dict -}}
{{- if and .gpus (eq .root.Values.gpu.allocation "devicePlugin") -}}
{{- $_ := set $devices .root.Values.gpu.resourceName (toString .gpus) -}}
{{- else if .gpus -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- if .rdma }}{{ $devices = mergeOverwrite $devices (deepCopy .root.Values.network.rdma.resources) }}{{ end -}}
{{- if $devices -}}
{{- $_ := set $resources "requests" (mergeOverwrite (default dict $resources.requests) (deepCopy $devices)) -}}
{{- $_ := set $resources "limits" (mergeOverwrite (default dict $resources.limits) $devices) -}}
{{- end -}}
{{- $resources | toJson -}}
{{- end }}

{{/* The files that no worker reads are those of cluster.config.hub. A complete copy is not downloaded again. */}}
{{- define "epdg.downloadContainer" -}}
{{- $hub := .Values.checkpoint.hub -}}
- name: download-model
  image: {{ include "epdg.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  command:
    - hf
    - download
    - {{ required "checkpoint.hub.id: the model's id on the hub, org/name" $hub.id | quote }}
    - --revision={{ $hub.revision }}
    - --local-dir=/models/hub
    {{- range .Files.Get "files/not-wanted.yaml" | fromYamlArray }}
    - {{ printf "--exclude=%s" . | quote }}
    {{- end }}
  {{- if $hub.tokenSecret.name }}
  env:
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $hub.tokenSecret.name }}
          key: {{ $hub.tokenSecret.key }}
  {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/epdg}
    - {name: model, mountPath: /models}
{{- end }}
