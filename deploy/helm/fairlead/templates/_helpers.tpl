{{- define "fairlead.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The image of a container. */}}
{{- define "fairlead.container" -}}
image: {{ include "fairlead.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* The fields of a Pod that values decide. Its argument has name and of, the component, and root. */}}
{{- define "fairlead.pod" -}}
serviceAccountName: fairlead-{{ .name }}
priorityClassName: {{ .of.priorityClassName }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- /* Copies are on different nodes, if possible. */}}
{{- define "fairlead.spread" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector: {matchLabels: {app.kubernetes.io/name: fairlead-{{ .name }}}}
{{- end }}

{{- /* Its argument has name and of, the component. */}}
{{- define "fairlead.budget" }}
{{- if .of.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: fairlead-{{ .name }}, namespace: kube-system}
spec:
  maxUnavailable: {{ .of.podDisruptionBudget.maxUnavailable }}
  selector: {matchLabels: {app.kubernetes.io/name: fairlead-{{ .name }}}}
---
{{- end }}
{{- end }}

{{- define "fairlead.account" }}
apiVersion: v1
kind: ServiceAccount
metadata: {name: fairlead-{{ . }}, namespace: kube-system}
{{- end }}

{{- /* Binds the ClusterRole of a name to the account of a name. */}}
{{- define "fairlead.clusterbinding" }}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: fairlead-{{ .role }}}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: fairlead-{{ .role }}}
subjects: [{kind: ServiceAccount, name: fairlead-{{ .name }}, namespace: kube-system}]
{{- end }}

{{- define "fairlead.binding" }}
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: fairlead-{{ . }}, namespace: kube-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: fairlead-{{ . }}}
subjects: [{kind: ServiceAccount, name: fairlead-{{ . }}, namespace: kube-system}]
{{- end }}

{{- /* The rules of the controller of load balancers for Ingresses and Gateways. */}}
{{- define "fairlead.lb.fronts" }}
rules:
- {apiGroups: [""], resources: [services], verbs: [create, patch, delete]}
- {apiGroups: [networking.k8s.io], resources: [ingresses, ingressclasses], verbs: [list, watch]}
- {apiGroups: [networking.k8s.io], resources: [ingressclasses], verbs: [create]}
- {apiGroups: [networking.k8s.io], resources: [ingresses/status], verbs: [update]}
- apiGroups: [gateway.networking.k8s.io]
  resources:
  - backendtlspolicies
  - gatewayclasses
  - gateways
  - grpcroutes
  - httproutes
  - listenersets
  - referencegrants
  - tcproutes
  - tlsroutes
  - udproutes
  verbs: [list, watch]
- {apiGroups: [gateway.networking.k8s.io], resources: [gatewayclasses], verbs: [create]}
- apiGroups: [gateway.networking.k8s.io]
  resources:
  - backendtlspolicies/status
  - gatewayclasses/status
  - gateways/status
  - grpcroutes/status
  - httproutes/status
  - listenersets/status
  - tcproutes/status
  - tlsroutes/status
  - udproutes/status
  verbs: [update]
# For clusters that check whose owner an object names.
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways/finalizers, listenersets/finalizers, referencegrants/finalizers, backendtlspolicies/finalizers]
  verbs: [update]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, update]
  resourceNames:
  - backendtlspolicies.gateway.networking.k8s.io
  - gatewayclasses.gateway.networking.k8s.io
  - gateways.gateway.networking.k8s.io
  - grpcroutes.gateway.networking.k8s.io
  - httproutes.gateway.networking.k8s.io
  - listenersets.gateway.networking.k8s.io
  - referencegrants.gateway.networking.k8s.io
  - tcproutes.gateway.networking.k8s.io
  - tlsroutes.gateway.networking.k8s.io
  - udproutes.gateway.networking.k8s.io
{{- end }}
