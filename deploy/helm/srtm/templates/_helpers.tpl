{{- define "srtm.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "srtm.selector" -}}
app.kubernetes.io/name: srtm
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "srtm.labels" -}}
{{ include "srtm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "srtm.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "srtm.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "srtm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "srtm.fieldRef" -}}
- name: {{ .name }}
  valueFrom:
    fieldRef:
      fieldPath: {{ .path }}
{{- end }}

{{/* The secrets, as files of a container. */}}
{{- define "srtm.mounts" -}}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/srtm/tls
  readOnly: true
- name: tokens
  mountPath: /etc/srtm/tokens
  readOnly: true
{{- end }}
{{- end }}

{{- define "srtm.volumes" -}}
{{- if .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secretName }}
- name: tokens
  secret:
    secretName: {{ .Values.tokens.secretName }}
{{- end }}
{{- end }}

{{- define "srtm.check" -}}
{{- if ne (empty .Values.tls.secretName) (empty .Values.tokens.secretName) }}
{{- fail "tls.secretName and tokens.secretName: want both or neither" }}
{{- end }}
{{- if and (gt (int .Values.loaddistributor.replicas) 1) (empty .Values.loaddistributor.etcd.endpoints) }}
{{- fail "loaddistributor.replicas: more than 1 needs loaddistributor.etcd.endpoints" }}
{{- end }}
{{- end }}

{{- define "srtm.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .tls }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{- define "srtm.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
