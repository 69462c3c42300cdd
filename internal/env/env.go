// Package env turns the Services that a Pod can see into the environment
// variables of its containers: {SVCNAME}_SERVICE_HOST and _PORT, and the older
// variables of Docker links (behaviours 68 to 72). It is pure: Services in,
// variables out.
package env

import (
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// The one Service that every Pod sees, whatever its namespace.
const (
	masterNamespace = corev1.NamespaceDefault
	masterName      = "kubernetes"
)

// For returns the variables of a Pod in namespace, sorted by name, each name
// once.
//
// services may hold any namespaces; only Services of the Pod's own and
// default/kubernetes count. With enableServiceLinks false only
// default/kubernetes does. Services without a virtual IP (headless,
// ExternalName, not yet allocated) give nothing.
//
// Two kinds of conflict are resolved here. A Service named kubernetes in the Pod's
// namespace hides default/kubernetes, as in kubelet. Two names that yield
// the same variable (foo-service's link variable FOO_SERVICE_PORT and foo's
// port) depend on map order in kubelet; here the documented _SERVICE_ variable
// wins, and between equals the Service whose name sorts first.
func For(namespace string, services []*corev1.Service, enableServiceLinks bool) []corev1.EnvVar {
	var plain, links []corev1.EnvVar
	for _, s := range visible(namespace, services, enableServiceLinks) {
		plain = append(plain, serviceVars(s)...)
		links = append(links, linkVars(s)...)
	}
	out := append(plain, links...)
	slices.SortStableFunc(out, func(a, b corev1.EnvVar) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(out, func(a, b corev1.EnvVar) bool { return a.Name == b.Name })
}

// visible returns the Services a Pod sees, one per name, sorted by name.
func visible(namespace string, services []*corev1.Service, links bool) []*corev1.Service {
	byName := map[string]*corev1.Service{}
	for _, s := range services {
		if s.Spec.Type == corev1.ServiceTypeExternalName || s.Spec.ClusterIP == "" ||
			s.Spec.ClusterIP == corev1.ClusterIPNone || len(s.Spec.Ports) == 0 {
			continue
		}
		switch {
		case s.Namespace == masterNamespace && s.Name == masterName:
			if byName[s.Name] == nil {
				byName[s.Name] = s
			}
		case s.Namespace == namespace && links:
			byName[s.Name] = s
		}
	}
	out := make([]*corev1.Service, 0, len(byName))
	for _, s := range byName {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *corev1.Service) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// HostVariable returns the name of the variable that has the address of a Service.
func HostVariable(service string) string { return variable(service) + "_SERVICE_HOST" }

func serviceVars(s *corev1.Service) []corev1.EnvVar {
	prefix := variable(s.Name) + "_SERVICE_"
	out := []corev1.EnvVar{
		{Name: HostVariable(s.Name), Value: s.Spec.ClusterIP},
		{Name: prefix + "PORT", Value: number(s.Spec.Ports[0].Port)},
	}
	for _, p := range s.Spec.Ports {
		if p.Name != "" {
			out = append(out, corev1.EnvVar{Name: prefix + "PORT_" + variable(p.Name), Value: number(p.Port)})
		}
	}
	return out
}

func linkVars(s *corev1.Service) []corev1.EnvVar {
	prefix := variable(s.Name) + "_PORT"
	var out []corev1.EnvVar
	for i, p := range s.Spec.Ports {
		proto := string(p.Protocol)
		if proto == "" {
			proto = string(corev1.ProtocolTCP)
		}
		port := number(p.Port)
		url := strings.ToLower(proto) + "://" + net.JoinHostPort(s.Spec.ClusterIP, port)
		if i == 0 {
			out = append(out, corev1.EnvVar{Name: prefix, Value: url})
		}
		one := prefix + "_" + port + "_" + strings.ToUpper(proto)
		out = append(out,
			corev1.EnvVar{Name: one, Value: url},
			corev1.EnvVar{Name: one + "_PROTO", Value: strings.ToLower(proto)},
			corev1.EnvVar{Name: one + "_PORT", Value: port},
			corev1.EnvVar{Name: one + "_ADDR", Value: s.Spec.ClusterIP},
		)
	}
	return out
}

func variable(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }

func number(p int32) string { return strconv.Itoa(int(p)) }
