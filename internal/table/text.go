package table

import (
	"fmt"
	"slices"
	"strings"
)

// String returns the Table as text: the settings, then one line a frontend,
// sorted. Endpoints on this node are marked with an asterisk. A service port
// without a frontend has its own line.
func (t *Table) String() string {
	var b strings.Builder
	if len(t.NodePortAddrs) > 0 {
		fmt.Fprintf(&b, "node ports on %s\n", words(t.NodePortAddrs))
	}
	if len(t.ClusterCIDRs) > 0 {
		fmt.Fprintf(&b, "pods in %s\n", words(t.ClusterCIDRs))
	}
	if len(t.PodInterfaces) > 0 {
		fmt.Fprintf(&b, "pods of this node on %s\n", words(t.PodInterfaces))
	}
	if len(t.LocalCIDRs) > 0 && !slices.Equal(t.LocalCIDRs, t.ClusterCIDRs) {
		fmt.Fprintf(&b, "pods of this node in %s\n", words(t.LocalCIDRs))
	}
	if len(t.ServiceCIDRs) > 0 {
		fmt.Fprintf(&b, "services in %s\n", words(t.ServiceCIDRs))
	}
	if t.MasqueradeAll {
		b.WriteString("masquerade all\n")
	}
	ports := slices.SortedFunc(t.All(), func(a, b *ServicePort) int {
		if c := a.ID.Compare(b.ID); c != 0 {
			return c
		}
		return int(a.Family) - int(b.Family)
	})
	for _, p := range ports {
		b.WriteString(p.String())
	}
	return b.String()
}

// String returns the lines of the port's frontends.
func (p *ServicePort) String() string {
	about := ""
	if p.Affinity > 0 {
		about += fmt.Sprintf(" affinity %s", p.Affinity)
	}
	if p.HealthCheckNodePort > 0 {
		about += fmt.Sprintf(" health check on %d: %d ready here", p.HealthCheckNodePort, p.LocalReady)
	}
	if kept := p.kept(); len(kept) > 0 {
		about += fmt.Sprintf(" kept [%s]", words(kept))
	}
	if len(p.Frontends) == 0 {
		return fmt.Sprintf("%s %s %s no frontend%s\n", p.ID, p.Protocol, p.Family, about)
	}
	var b strings.Builder
	for _, f := range p.Frontends {
		fmt.Fprintf(&b, "%s %s %s%s\n", p.ID, p.Protocol, f.String(), about)
	}
	return b.String()
}

// kept are the endpoints that flows may keep, but no new connection is sent to.
func (p *ServicePort) kept() []Endpoint {
	var out []Endpoint
	for _, e := range p.Serving {
		if !slices.ContainsFunc(p.Frontends, func(f Frontend) bool {
			return slices.Contains(f.Endpoints, e) || slices.Contains(f.LocalClients, e)
		}) {
			out = append(out, e)
		}
	}
	return out
}

// String returns for example
// "NodePort 0.0.0.0:30080 -> 10.244.0.5:80* 10.244.1.7:80 masquerade".
func (f *Frontend) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s -> %s", f.Kind, f.Addr, endpoints(f.Endpoints, f.Drop))
	if f.LocalClients != nil {
		fmt.Fprintf(&b, " local clients -> %s", endpoints(f.LocalClients, false))
	}
	if f.Hops != nil {
		fmt.Fprintf(&b, " by [%s]", words(f.Hops))
	}
	if f.Masquerade {
		b.WriteString(" masquerade")
	}
	if f.SourceRanges != nil {
		fmt.Fprintf(&b, " from [%s]", words(f.SourceRanges))
	}
	return b.String()
}

// String returns the address, with an asterisk for an endpoint on this node, and its weight
// where it has one: "10.244.0.5:80* weight 3".
func (e Endpoint) String() string {
	text := e.Addr.String()
	if e.Local {
		text += "*"
	}
	if e.Weight > 0 {
		text += fmt.Sprintf(" weight %d", e.Weight)
	}
	return text
}

func endpoints(eps []Endpoint, drop bool) string {
	switch {
	case len(eps) > 0:
		return words(eps)
	case drop:
		return "drop"
	}
	return "reject"
}

func words[T fmt.Stringer](all []T) string {
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = v.String()
	}
	return strings.Join(texts, " ")
}
