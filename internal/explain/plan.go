package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// World is what decides about Services, before or after a change.
type World struct {
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
	Pods     []*corev1.Pod
	Nodes    []*corev1.Node
}

// Change is one difference that an apply would make.
type Change struct {
	Service string `json:"service"`
	// Nodes are the nodes with the difference, empty for all of them, or where it is none of a node.
	Nodes []string `json:"nodes,omitempty"`
	Text  string   `json:"text"`
	// Cuts is why the difference ends open connections, empty if it does not.
	Cuts string `json:"cuts,omitempty"`
}

// Follow returns the EndpointSlices after the controllers have followed the changes of the Services named, or of their Pods.
func (w *World) Follow(services map[svc.Name]bool) []*discoveryv1.EndpointSlice {
	out := slices.Clone(w.Slices)
	nodes := map[string]*corev1.Node{}
	for _, n := range w.Nodes {
		nodes[n.Name] = n
	}
	for _, s := range w.Services {
		if !services[svc.NameOf(s)] || len(s.Spec.Selector) == 0 || s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		in := epslice.Input{Service: s, Node: func(n string) *corev1.Node { return nodes[n] }}
		for _, p := range w.Pods {
			if Selects(s, p) {
				in.Pods = append(in.Pods, p)
			}
		}
		for _, e := range out {
			if e.Namespace == s.Namespace && e.Labels[discoveryv1.LabelServiceName] == s.Name &&
				e.Labels[discoveryv1.LabelManagedBy] == svc.ManagedBySelector {
				in.Present = append(in.Present, e)
			}
		}
		plan := epslice.Slices(in)
		for _, gone := range slices.Concat(plan.Update, plan.Delete) {
			out = slices.DeleteFunc(out, func(e *discoveryv1.EndpointSlice) bool {
				return e.Namespace == gone.Namespace && e.Name == gone.Name
			})
		}
		out = slices.Concat(out, plan.Create, plan.Update)
	}
	return out
}

// Differences returns what changes for the Services named from one World to another, on the nodes of the second.
func Differences(c *Cluster, before, after *World, services map[svc.Name]bool, domains []string) []Change {
	var out []Change
	for n := range services {
		out = append(out, names(n, before, after, domains)...)
		out = append(out, givenBack(n, before, after)...)
	}
	mine := map[string]bool{}
	before.places(services, mine)
	after.places(services, mine)
	wereServices, wereSlices := before.beside(mine), before.of(services)
	areServices, areSlices := after.beside(mine), after.of(services)
	for _, node := range after.Nodes {
		was := Build(c, node.Name, node, wereServices, wereSlices)
		is := Build(c, node.Name, node, areServices, areSlices)
		for n := range services {
			for _, d := range between(ports(was, n), ports(is, n)) {
				d.Service, d.Nodes = n.String(), []string{node.Name}
				out = merge(out, d)
			}
		}
	}
	for i := range out {
		if len(out[i].Nodes) == len(after.Nodes) {
			out[i].Nodes = nil
		}
	}
	slices.SortStableFunc(out, func(a, b Change) int { return strings.Compare(a.Service, b.Service) })
	return out
}

// merge adds a difference, or the node to one that is equal.
func merge(to []Change, d Change) []Change {
	for i := range to {
		if to[i].Service == d.Service && to[i].Text == d.Text && to[i].Cuts == d.Cuts && len(to[i].Nodes) > 0 {
			to[i].Nodes = append(to[i].Nodes, d.Nodes...)
			return to
		}
	}
	return append(to, d)
}

// of returns the slices of the Services named.
func (w *World) of(services map[svc.Name]bool) (out []*discoveryv1.EndpointSlice) {
	for _, s := range w.Slices {
		if services[svc.Name{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}] {
			out = append(out, s)
		}
	}
	return out
}

// places adds the addresses and node ports of the Services named.
func (w *World) places(services map[svc.Name]bool, to map[string]bool) {
	for _, s := range w.Services {
		if services[svc.NameOf(s)] {
			for _, p := range placesOf(s) {
				to[p] = true
			}
		}
	}
}

// beside returns the Services with one of the places: only they decide who gets it.
func (w *World) beside(places map[string]bool) (out []*corev1.Service) {
	for _, s := range w.Services {
		if slices.ContainsFunc(placesOf(s), func(p string) bool { return places[p] }) {
			out = append(out, s)
		}
	}
	return out
}

// placesOf are the addresses and node ports of a Service, and its name, so that each has a place.
func placesOf(s *corev1.Service) []string {
	out := append([]string{svc.NameOf(s).String()}, s.Spec.ExternalIPs...)
	for _, ip := range append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...) {
		if ip != "" && ip != corev1.ClusterIPNone {
			out = append(out, ip)
		}
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		if i.IP != "" {
			out = append(out, i.IP)
		}
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out = append(out, strconv.Itoa(int(p.NodePort)))
		}
	}
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		out = append(out, strconv.Itoa(int(p)))
	}
	return out
}

func (w *World) find(n svc.Name) *corev1.Service { return (&Objects{Services: w.Services}).find(n) }

func ports(t *table.Table, n svc.Name) map[table.Key]*table.ServicePort {
	out := map[table.Key]*table.ServicePort{}
	for _, p := range Choose(t, n, netip.AddrPort{}, 0) {
		out[p.Key()] = p
	}
	return out
}

// between compares the ports of a Service.
func between(was, is map[table.Key]*table.ServicePort) (out []Change) {
	for _, k := range sortedKeys(was, is) {
		a, b := was[k], is[k]
		for _, f := range fronts(a) {
			if twin(b, f) == nil {
				out = append(out, removed(a, f))
			}
		}
		for _, f := range fronts(b) {
			switch old := twin(a, f); {
			case old == nil:
				out = append(out, Change{Text: describe(b, f) + " is added, " + fate(f)})
			default:
				out = append(out, changed(b, old, f)...)
			}
		}
		out = append(out, endpointsLost(a, b)...)
	}
	return out
}

func sortedKeys(was, is map[table.Key]*table.ServicePort) []table.Key {
	var out []table.Key
	for k := range was {
		out = append(out, k)
	}
	for k := range is {
		if was[k] == nil {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, func(a, b table.Key) int {
		if c := a.ID.Compare(b.ID); c != 0 {
			return c
		}
		return int(a.Family) - int(b.Family)
	})
	return out
}

func fronts(p *table.ServicePort) []*table.Frontend {
	if p == nil {
		return nil
	}
	out := make([]*table.Frontend, len(p.Frontends))
	for i := range out {
		out[i] = &p.Frontends[i]
	}
	return out
}

// twin returns the frontend of a port at the place of another one, nil if there is none.
func twin(p *table.ServicePort, f *table.Frontend) *table.Frontend {
	for _, o := range fronts(p) {
		if o.Kind == f.Kind && o.Addr == f.Addr {
			return o
		}
	}
	return nil
}

func describe(p *table.ServicePort, f *table.Frontend) string {
	if f.Kind == table.NodePort {
		return fmt.Sprintf("%s %s %d (%s)", f.Kind, p.Protocol, f.Addr.Port(), p.Family)
	}
	return fmt.Sprintf("%s %s %s", f.Kind, p.Protocol, f.Addr)
}

func fate(f *table.Frontend) string {
	switch {
	case f.Hops != nil:
		return fmt.Sprintf("passed on to the endpoints of %d nodes", len(f.Hops))
	case len(f.Endpoints) > 0:
		return fmt.Sprintf("sent to %d endpoints", len(f.Endpoints))
	case f.Drop:
		return "dropped: policy Local, and no endpoint on the node"
	}
	return "refused: no endpoint"
}

// removed is for a frontend that goes. Connections of TCP are kept by connection tracking as long as packets still come
// to the node; flows of UDP and SCTP are forgotten, so that they do not go on to an endpoint that is no longer theirs.
func removed(p *table.ServicePort, f *table.Frontend) Change {
	c := Change{Text: describe(p, f) + " is removed"}
	if p.Protocol != svc.TCP && len(f.Endpoints)+len(f.LocalClients) > 0 {
		c.Cuts = "flows of " + p.Protocol.String() + " to it are forgotten"
	}
	return c
}

// changed compares a frontend with what it was.
func changed(p *table.ServicePort, was, is *table.Frontend) (out []Change) {
	name := describe(p, is)
	gone, added := lost(was.Endpoints, is.Endpoints), lost(is.Endpoints, was.Endpoints)
	switch {
	case len(gone)+len(added) > 0 && len(is.Endpoints) == 0:
		out = append(out, Change{Text: name + " loses its last endpoint: new connections are " + fate(is)})
	case len(gone)+len(added) > 0 && len(was.Endpoints) == 0:
		out = append(out, Change{Text: name + " gets endpoints: " + words(added)})
	case len(gone)+len(added) > 0:
		text := name + ":"
		if len(gone) > 0 {
			text += " new connections no longer go to " + words(gone)
		}
		if len(added) > 0 {
			text += " new connections go to " + words(added)
		}
		out = append(out, Change{Text: text})
	case was.Drop != is.Drop:
		out = append(out, Change{Text: name + ": new connections are " + fate(is)})
	}
	if !slices.Equal(was.SourceRanges, is.SourceRanges) || (was.SourceRanges == nil) != (is.SourceRanges == nil) {
		text := "everybody"
		if is.SourceRanges != nil {
			text = fmt.Sprint(is.SourceRanges)
		}
		out = append(out, Change{Text: name + " lets in " + text + " for new connections"})
	}
	return out
}

func lost(from, to []table.Endpoint) (out []netip.AddrPort) {
	for _, e := range from {
		if !slices.ContainsFunc(to, func(o table.Endpoint) bool { return o.Addr == e.Addr }) {
			out = append(out, e.Addr)
		}
	}
	return out
}

func words(list []netip.AddrPort) string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	const named = 5
	return joined(out, named)
}

// endpointsLost are the endpoints that flows of UDP and SCTP may not keep.
func endpointsLost(was, is *table.ServicePort) []Change {
	if was == nil || is == nil || was.Protocol == svc.TCP {
		return nil
	}
	gone := lost(was.Serving, is.Serving)
	if len(gone) == 0 {
		return nil
	}
	return []Change{{Text: fmt.Sprintf("port %s: endpoints that no longer serve: %s", is.ID.Port, words(gone)),
		Cuts: "flows of " + was.Protocol.String() + " to them are forgotten"}}
}

// names compares what DNS answers for a Service.
func names(n svc.Name, before, after *World, domains []string) []Change {
	was, is := answers(before, n), answers(after, n)
	if was == is || len(domains) == 0 {
		return nil
	}
	name := n.Name + "." + n.Namespace + ".svc." + domains[0]
	switch {
	case was == "":
		return []Change{{Service: n.String(), Text: "DNS: " + name + " begins to resolve, to " + is}}
	case is == "":
		return []Change{{Service: n.String(), Text: "DNS: " + name + " no longer resolves"}}
	}
	return []Change{{Service: n.String(), Text: "DNS: " + name + " changes from " + was + " to " + is}}
}

// answers is what the name of a Service leads to.
func answers(w *World, n svc.Name) string {
	s := w.find(n)
	switch {
	case s == nil:
		return ""
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return "alias " + s.Spec.ExternalName
	case s.Spec.ClusterIP != corev1.ClusterIPNone:
		return strings.Join(s.Spec.ClusterIPs, ", ")
	}
	var out []string
	for _, e := range w.of(map[svc.Name]bool{n: true}) {
		for _, ep := range e.Endpoints {
			if s.Spec.PublishNotReadyAddresses || ep.Conditions.Ready == nil || *ep.Conditions.Ready {
				out = append(out, ep.Addresses...)
			}
		}
	}
	slices.Sort(out)
	return strings.Join(slices.Compact(out), ", ")
}

// givenBack are the addresses of a load balancer that a Service gives back: nothing answers there any more.
func givenBack(n svc.Name, before, after *World) (out []Change) {
	was, is := before.find(n), after.find(n)
	if was == nil {
		return nil
	}
	for _, ing := range was.Status.LoadBalancer.Ingress {
		if is == nil || !slices.ContainsFunc(is.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == ing.IP }) {
			out = append(out, Change{Service: n.String(), Text: "the load balancer's address " + ing.IP + " is given back",
				Cuts: "connections to it end: no node answers for it any more"})
		}
	}
	return out
}
