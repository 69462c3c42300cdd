package api

import (
	"encoding/json"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"
)

// typeMeta is what a body says about its type when the file leaves it out.
type typeMeta struct{ apiVersion, kind string }

// resources are what the short targets of a file may begin with.
var resources = map[string]struct {
	typeMeta
	namespaced bool
}{
	"services":              {typeMeta{"v1", "Service"}, true},
	"endpoints":             {typeMeta{"v1", "Endpoints"}, true},
	"pods":                  {typeMeta{"v1", "Pod"}, true},
	"configmaps":            {typeMeta{"v1", "ConfigMap"}, true},
	"secrets":               {typeMeta{"v1", "Secret"}, true},
	"serviceaccounts":       {typeMeta{"v1", "ServiceAccount"}, true},
	"events":                {typeMeta{"v1", "Event"}, true},
	"nodes":                 {typeMeta{"v1", "Node"}, false},
	"namespaces":            {typeMeta{"v1", "Namespace"}, false},
	"endpointslices":        {typeMeta{"discovery.k8s.io/v1", "EndpointSlice"}, true},
	"leases":                {typeMeta{"coordination.k8s.io/v1", "Lease"}, true},
	"ingresses":             {typeMeta{"networking.k8s.io/v1", "Ingress"}, true},
	"ingressclasses":        {typeMeta{"networking.k8s.io/v1", "IngressClass"}, false},
	"ipaddresses":           {typeMeta{"networking.k8s.io/v1", "IPAddress"}, false},
	"servicecidrs":          {typeMeta{"networking.k8s.io/v1", "ServiceCIDR"}, false},
	"events.events.k8s.io":  {typeMeta{"events.k8s.io/v1", "Event"}, true},
	"serviceaccounts/token": {typeMeta{"authentication.k8s.io/v1", "TokenRequest"}, true},
	"pods/binding":          {typeMeta{"v1", "Binding"}, true},
	"clusterroles":          {typeMeta{"rbac.authorization.k8s.io/v1", "ClusterRole"}, false},
	"clusterrolebindings":   {typeMeta{"rbac.authorization.k8s.io/v1", "ClusterRoleBinding"}, false},
	"roles":                 {typeMeta{"rbac.authorization.k8s.io/v1", "Role"}, true},
	"rolebindings":          {typeMeta{"rbac.authorization.k8s.io/v1", "RoleBinding"}, true},

	"deployments":          {typeMeta{"apps/v1", "Deployment"}, true},
	"replicasets":          {typeMeta{"apps/v1", "ReplicaSet"}, true},
	"daemonsets":           {typeMeta{"apps/v1", "DaemonSet"}, true},
	"controllerrevisions":  {typeMeta{"apps/v1", "ControllerRevision"}, true},
	"poddisruptionbudgets": {typeMeta{"policy/v1", "PodDisruptionBudget"}, true},
	"deployments/scale":    {typeMeta{"autoscaling/v1", "Scale"}, true},
	"pods/eviction":        {typeMeta{"policy/v1", "Eviction"}, true},

	"validatingwebhookconfigurations":   {typeMeta{"admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration"}, false},
	"mutatingwebhookconfigurations":     {typeMeta{"admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration"}, false},
	"validatingadmissionpolicies":       {typeMeta{"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"}, false},
	"validatingadmissionpolicybindings": {typeMeta{"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"}, false},
	"mutatingadmissionpolicies":         {typeMeta{"admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy"}, false},
	"mutatingadmissionpolicybindings":   {typeMeta{"admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding"}, false},
}

// resolve makes the path of a request of a target: a whole path, or RESOURCE,
// RESOURCE/NAME and RESOURCE/NAME/SUBRESOURCE in the namespace ns.
func resolve(target, ns string) (path string, kind typeMeta, err error) {
	if strings.HasPrefix(target, "/") {
		return target, typeMeta{}, nil
	}
	bare, query, _ := strings.Cut(target, "?")
	name, rest, _ := strings.Cut(bare, "/")
	r, ok := resources[name]
	if !ok {
		return "", typeMeta{}, fmt.Errorf("%q is not a known resource", name)
	}
	kind = r.typeMeta
	if parts := strings.Split(rest, "/"); len(parts) == 2 {
		if sub, ok := resources[name+"/"+parts[1]]; ok {
			kind = sub.typeMeta
		}
	}
	name, _, _ = strings.Cut(name, ".")
	path = "/apis/" + r.apiVersion
	if r.apiVersion == "v1" {
		path = "/api/v1"
	}
	if r.namespaced {
		path += "/namespaces/" + ns
	}
	path += "/" + name
	if rest != "" {
		path += "/" + rest
	}
	if query != "" {
		path += "?" + query
	}
	return path, kind, nil
}

// object turns the YAML of a body into JSON and fills in its type.
func object(body string, kind typeMeta) ([]byte, error) {
	if strings.TrimSpace(body) == "" {
		return nil, nil
	}
	var v any
	if err := yaml.Unmarshal([]byte(body), &v); err != nil {
		return nil, fmt.Errorf("the body is not YAML: %w", err)
	}
	if m, ok := v.(map[string]any); ok && kind.kind != "" {
		if _, ok := m["apiVersion"]; !ok {
			m["apiVersion"] = kind.apiVersion
		}
		if _, ok := m["kind"]; !ok {
			m["kind"] = kind.kind
		}
	}
	return json.Marshal(v)
}
