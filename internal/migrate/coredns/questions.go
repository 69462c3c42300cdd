package coredns

import (
	"slices"
	"strings"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
)

// sampled bounds the Services whose names are asked for.
const sampled = 30

// questions returns the questions by which two servers are compared, as NAME/TYPE: the Service kubernetes, a sample of all
// Services, a name that no Service has, and the version of the specification. Names outside of the cluster are not among them,
// since their answers change by themselves.
func questions(s *settings, services []*corev1.Service) (out []string) {
	for _, zone := range s.zones {
		out = append(out, "dns-version."+zone+"/TXT", "fairlead-no-such-name.default.svc."+zone+"/A")
		for _, service := range sample(services) {
			name := service.Name + "." + service.Namespace + ".svc." + zone
			out = append(out, name+"/A", name+"/AAAA")
			for _, p := range service.Spec.Ports {
				if p.Name != "" {
					out = append(out, "_"+p.Name+"._"+strings.ToLower(string(p.Protocol))+"."+name+"/SRV")
					break
				}
			}
			for _, ip := range service.Spec.ClusterIPs {
				if reverse, err := dns.ReverseAddr(ip); err == nil && s.reverse { // "None" has no such name
					out = append(out, reverse+"/PTR")
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// sample chooses Services at equal distances in the order of their names, and kubernetes. An ExternalName is of another server.
func sample(services []*corev1.Service) (out []*corev1.Service) {
	var all []*corev1.Service
	for _, s := range services {
		switch {
		case s.Spec.Type == corev1.ServiceTypeExternalName:
		case s.Namespace == corev1.NamespaceDefault && s.Name == "kubernetes":
			out = append(out, s)
		default:
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *corev1.Service) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	n := min(len(all), sampled)
	for i := range n {
		out = append(out, all[i*len(all)/n])
	}
	return out
}
