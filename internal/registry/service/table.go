package service

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

func newTable() rest.TableConvertor {
	doc := corev1.ServiceSpec{}.SwaggerDoc()
	return store.NewTable([]store.Column{
		{Name: "Type", Description: doc["type"]},
		{Name: "Cluster-IP", Description: doc["clusterIP"]},
		{Name: "External-IP", Description: doc["externalIPs"]},
		{Name: "Port(s)", Description: doc["ports"]},
		store.AgeColumn(),
		{Name: "Selector", Wide: true, Description: doc["selector"]},
	}, func(s *corev1.Service) []any {
		ip := s.Spec.ClusterIP
		if len(s.Spec.ClusterIPs) > 0 {
			ip = s.Spec.ClusterIPs[0]
		}
		return []any{
			string(s.Spec.Type), store.OrNone(ip), externalIPText(s), portsText(s.Spec.Ports),
			store.Age(s.CreationTimestamp), labels.FormatLabels(s.Spec.Selector),
		}
	})
}

// externalIPText is what reaches the Service from outside.
func externalIPText(s *corev1.Service) string {
	switch s.Spec.Type {
	case corev1.ServiceTypeExternalName:
		return s.Spec.ExternalName
	case corev1.ServiceTypeLoadBalancer:
		var out []string
		seen := map[string]bool{}
		for _, ing := range s.Status.LoadBalancer.Ingress {
			at := ing.IP
			if at == "" {
				at = ing.Hostname
			}
			if at != "" && !seen[at] {
				out = append(out, at)
			}
			seen[at] = true
		}
		if out = append(out, s.Spec.ExternalIPs...); len(out) == 0 {
			return "<pending>"
		}
		return strings.Join(out, ",")
	}
	return store.OrNone(strings.Join(s.Spec.ExternalIPs, ","))
}

// portsText is "80/TCP,53:30053/UDP".
func portsText(ports []corev1.ServicePort) string {
	var out []string
	for _, p := range ports {
		if p.NodePort > 0 {
			out = append(out, fmt.Sprintf("%d:%d/%s", p.Port, p.NodePort, p.Protocol))
		} else {
			out = append(out, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
		}
	}
	return store.OrNone(strings.Join(out, ","))
}
