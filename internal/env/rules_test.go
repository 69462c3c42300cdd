package env_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/env"
)

// rules is how a container finds a Service, as kubelet (pkg/kubelet/envvars) and
// Docker's links have it: NAME is the Service's name, PORTNAME that of a port,
// both in upper case with underscores; proto is in lower case, PROTO in upper.
const rules = `
first NAME_SERVICE_HOST=IP
first NAME_SERVICE_PORT=PORT
named NAME_SERVICE_PORT_PORTNAME=PORT
first NAME_PORT=proto://HOST:PORT
every NAME_PORT_PORT_PROTO=proto://HOST:PORT
every NAME_PORT_PORT_PROTO_PROTO=proto
every NAME_PORT_PORT_PROTO_PORT=PORT
every NAME_PORT_PORT_PROTO_ADDR=IP
`

// expand fills one rule in. The places to fill are marked apart first, since
// PORT and PROTO are also fixed parts of names.
func expand(rule string, s *corev1.Service, p corev1.ServicePort) string {
	when, line, _ := strings.Cut(rule, " ")
	upper := func(s string) string { return strings.ToUpper(strings.ReplaceAll(s, "-", "_")) }
	host := s.Spec.ClusterIP
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	name, value, _ := strings.Cut(line, "=")
	suffix := strings.TrimPrefix(name, "NAME")
	switch {
	case when == "named":
		suffix = "_SERVICE_PORT_" + upper(p.Name)
	case when == "every":
		suffix = fmt.Sprintf("_PORT_%d_%s", p.Port, p.Protocol) + strings.TrimPrefix(suffix, "_PORT_PORT_PROTO")
	}
	value = strings.NewReplacer("proto", strings.ToLower(string(p.Protocol)), "HOST", host, "IP", s.Spec.ClusterIP, "PORT",
		fmt.Sprint(p.Port)).Replace(value)
	return upper(s.Name) + suffix + "=" + value
}

// The variables are those of the table of rules, for any Services whose names
// cannot clash.
func TestTableOfRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var services []*corev1.Service
		var want []string
		for i := range rapid.IntRange(0, 5).Draw(t, "services") {
			ip := rapid.SampledFrom([]string{fmt.Sprintf("10.96.1.%d", i), fmt.Sprintf("fd00:10:96::%x", i+1), corev1.ClusterIPNone}).Draw(t, "ip")
			s := service("shop", fmt.Sprintf("s%d-%s", i, rapid.StringMatching(`[a-z]{1,4}(-[a-z]{1,3})?`).Draw(t, "name")), ip)
			for j := range rapid.IntRange(1, 3).Draw(t, "ports") {
				p := port("", int32(1000*j+rapid.IntRange(1, 999).Draw(t, "port")), rapid.SampledFrom([]corev1.Protocol{"TCP", "UDP", "SCTP"}).Draw(t,
					"protocol"))
				if rapid.Bool().Draw(t, "named") {
					p.Name = fmt.Sprintf("p%d-x", j)
				}
				s.Spec.Ports = append(s.Spec.Ports, p)
			}
			services = append(services, s)
			if ip == corev1.ClusterIPNone {
				continue
			}
			for rule := range strings.Lines(strings.TrimSpace(rules)) {
				rule = strings.TrimSpace(rule)
				for j, p := range s.Spec.Ports {
					if strings.HasPrefix(rule, "every") || strings.HasPrefix(rule, "first") && j == 0 || strings.HasPrefix(rule, "named") && p.Name != "" {
						want = append(want, expand(rule, s, p))
					}
				}
			}
		}
		got := strings.Fields(lines(env.For("shop", services, true)))
		slices.Sort(want)
		slices.Sort(got)
		if d := cmp.Diff(strings.Join(want, "\n"), strings.Join(got, "\n")); d != "" {
			t.Fatal(d)
		}
	})
}
