package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/env"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// service explains all frontends of a Service.
func (e *explaining) service(n svc.Name) {
	if n == (svc.Name{}) {
		n = e.question.Service
	}
	e.target = n
	if e.question.Then {
		e.then(n)
		return
	}
	s := e.objects.find(n)
	if s == nil {
		e.verdict.end(NoName, NoService, "there is no Service "+n.String()+e.objects.near(n), "API server: Services of namespace "+n.Namespace)
		return
	}
	e.verdict.Service = n.String()
	e.names(s)
	e.written(s)
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		e.verdict.Answer = Elsewhere
		e.verdict.add("its name is an alias of "+s.Spec.ExternalName, about("Service", n, "spec.externalName"))
		return
	}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		e.headless(s)
		return
	}
	e.pending(s)
	if len(e.facts.Ports) == 0 {
		e.unknown(s)
		return
	}
	e.all(func(*table.Frontend) bool { return true })
}

// all explains the frontends that which accepts, and lists the endpoints.
func (e *explaining) all(which func(*table.Frontend) bool) {
	for i := range e.facts.Ports {
		p := &e.facts.Ports[i]
		for k := range p.Frontends {
			if which(&p.Frontends[k]) {
				e.verdict.Frontends = append(e.verdict.Frontends, e.frontend(p, k))
			}
		}
	}
	for _, text := range e.facts.Problems {
		e.verdict.add(text, "node "+e.facts.Node)
	}
	e.uncovered()
	e.worst()
	e.endpoints()
	e.tracked()
}

// uncovered names Pods whose connections connect-time does not translate, if the client may be one.
func (e *explaining) uncovered() {
	u := e.facts.Uncovered
	if u == nil || e.question.Then || !u.of(&e.question.Client) {
		return
	}
	who := "the client"
	if len(e.question.Client.Addrs) == 0 {
		who = "some Pods"
	}
	text := fmt.Sprintf("the rules of mode %s translate connections of %s, not connect-time: %s; %s", e.facts.Mode, who, u.Text, u.Remedy)
	e.verdict.add(text, "node "+e.facts.Node+" --connect-time-cgroup")
}

// then explains what a node had for a Service at an earlier time.
func (e *explaining) then(n svc.Name) {
	e.verdict.Service = n.String()
	switch {
	case e.facts.Problem != "":
		e.verdict.Answer = Unknown
		return
	case len(e.facts.Ports) == 0:
		e.verdict.end(Dropped, NoService, "node "+e.facts.Node+" had no port of it at that time", "history of node "+e.facts.Node)
		return
	}
	e.all(func(*table.Frontend) bool { return true })
}

// near names the Services that may have been meant.
func (o *Objects) near(n svc.Name) string {
	var same, others []string
	for _, s := range o.Services {
		switch {
		case s.Namespace == n.Namespace:
			same = append(same, s.Name)
		case s.Name == n.Name:
			others = append(others, s.Namespace)
		}
	}
	slices.Sort(same)
	slices.Sort(others)
	const named = 8
	switch {
	case len(others) > 0:
		return "; there is one in " + joined(others, named)
	case len(same) > 0:
		return "; there are " + joined(same, named)
	}
	return ""
}

// unknown is for a Service that the node's table does not have.
func (e *explaining) unknown(s *corev1.Service) {
	n := svc.NameOf(s)
	if who, other := s.Labels["service.kubernetes.io/service-proxy-name"]; other {
		e.verdict.Answer = Elsewhere
		e.verdict.add("another proxy serves it: "+who, about("Service", n, "label service.kubernetes.io/service-proxy-name"))
		return
	}
	e.verdict.end(Dropped, Rejected, "the table of node "+e.facts.Node+" does not have it", "node "+e.facts.Node)
}

// headless is for a Service without an address: clients connect to the endpoints that DNS names.
func (e *explaining) headless(s *corev1.Service) {
	n := svc.NameOf(s)
	e.verdict.add("it has no address: its name leads to its endpoints", about("Service", n, "spec.clusterIP"))
	ready := 0
	var first *listed
	for _, slice := range e.objects.Slices {
		for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
			if slice.AddressType != addressType(f) {
				continue
			}
			for _, l := range e.objects.listed(e.facts.Node, n, table.Key{Family: f}, svc.TCP) {
				if l.slice != slice {
					continue
				}
				if l.state.Is(table.Ready) || s.Spec.PublishNotReadyAddresses {
					ready++
				} else if first == nil {
					first = &l
				}
			}
		}
	}
	e.byName(s)
	switch {
	case ready > 0:
		e.verdict.add(fmt.Sprintf("%d endpoints are in DNS", ready), "EndpointSlices of Service "+n.String())
	case first != nil:
		e.verdict.end(NoName, Unready, "no endpoint is ready, so that its name has no address"+e.objects.trouble(first),
			first.source("conditions.ready"))
	default:
		e.verdict.end(NoName, NoEndpoint, "it has no endpoint, so that its name has no address", "EndpointSlices of Service "+n.String())
	}
}

// byName lists the endpoints of a headless Service: clients connect to those in DNS.
func (e *explaining) byName(s *corev1.Service) {
	n, ports, seen := svc.NameOf(s), s.Spec.Ports, map[string]bool{}
	if len(ports) == 0 {
		ports = []corev1.ServicePort{{}} // endpoints without a port
	}
	for i := range ports {
		proto, err := svc.ParseProtocol(string(cmp.Or(ports[i].Protocol, corev1.ProtocolTCP)))
		if err != nil {
			continue
		}
		for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
			key := table.Key{ID: svc.PortName{Name: n, Port: ports[i].Name}, Family: f}
			for _, l := range e.objects.listed(e.facts.Node, n, key, proto) {
				if out := e.named(&l, s.Spec.PublishNotReadyAddresses); !seen[out.Address] {
					seen[out.Address] = true
					e.verdict.Endpoints = append(e.verdict.Endpoints, out)
				}
			}
		}
	}
	slices.SortStableFunc(e.verdict.Endpoints, mayFirst)
}

// named is an endpoint of a headless Service, and whether DNS has it.
func (e *explaining) named(l *listed, unready bool) Endpoint {
	out := Endpoint{Address: l.addr.String(), Node: l.node(), May: l.state.Is(table.Ready) || unready}
	if l.port != 0 {
		out.Address = netip.AddrPortFrom(l.addr, l.port).String()
	}
	if l.pod != nil {
		out.Pod = l.pod.Name
	}
	line := Line{"ready, and in DNS", l.source("conditions.ready")}
	switch {
	case l.state.Is(table.Ready):
	case unready:
		line = Line{"not ready, and in DNS" + e.objects.trouble(l), about("Service", e.target, "spec.publishNotReadyAddresses")}
	case l.terminating():
		line = Line{"terminating, and not in DNS", l.source("conditions.terminating")}
	default:
		line = Line{"not ready, and not in DNS" + e.objects.trouble(l), l.source("conditions.ready")}
	}
	out.Why = append(out.Why, line)
	return out
}

// names lists what leads to a Service.
func (e *explaining) names(s *corev1.Service) {
	for _, d := range e.objects.Domains {
		e.verdict.add("its name is "+s.Name+"."+s.Namespace+".svc."+d, "DNS of the cluster domain "+d)
	}
	host := env.HostVariable(s.Name)
	for _, v := range env.For(s.Namespace, e.objects.Services, true) {
		if v.Name == host && v.Value == s.Spec.ClusterIP {
			e.verdict.add("Pods of its namespace that start from now on have it as "+host, "environment of Pods with enableServiceLinks")
		}
	}
}

// written adds the last write of the Service, of its EndpointSlices, or of the Pods that it selects.
func (e *explaining) written(s *corev1.Service) {
	var last struct {
		*metav1.ManagedFieldsEntry
		object string
	}
	see := func(kind string, o metav1.Object) {
		fields := o.GetManagedFields()
		for i := range fields {
			if f := &fields[i]; f.Time != nil && f.Subresource == "" && (last.ManagedFieldsEntry == nil || last.Time.Before(f.Time)) {
				last.ManagedFieldsEntry, last.object = f, kind+" "+svc.Name{Namespace: o.GetNamespace(), Name: o.GetName()}.String()
			}
		}
	}
	see("Service", s)
	for _, slice := range e.objects.Slices {
		if slice.Namespace == s.Namespace && slice.Labels[discoveryv1.LabelServiceName] == s.Name {
			see("EndpointSlice", slice)
		}
	}
	for _, p := range e.objects.Pods {
		if Selects(s, p) {
			see("Pod", p)
		}
	}
	if last.ManagedFieldsEntry != nil {
		e.verdict.add(fmt.Sprintf("last write: %s, by %s (%s) at %s", last.object, last.Manager, last.Operation,
			last.Time.UTC().Format(time.RFC3339)), last.object+" metadata.managedFields")
	}
}

// pending adds that a load balancer has no address.
func (e *explaining) pending(s *corev1.Service) {
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0 {
		e.verdict.add("it has no address of a load balancer yet: see 'fairlead lb status'",
			about("Service", svc.NameOf(s), "status.loadBalancer.ingress"))
	}
}

// address explains an address.
func (e *explaining) address() {
	at := e.question.Address
	if len(e.facts.Ports) > 0 {
		e.target = e.facts.Ports[0].ID.Name
		if s := e.objects.find(e.target); s != nil {
			e.verdict.Service = e.target.String()
			e.names(s)
			e.written(s)
		}
		e.all(func(f *table.Frontend) bool { return isAt(f, at, e.facts.NodePortAddrs) })
		return
	}
	if e.owned(at) {
		return
	}
	switch {
	case slices.ContainsFunc(e.facts.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(at.Addr()) }):
		e.verdict.end(Dropped, NoService, "no Service has the address "+at.Addr().String()+", and what is sent there is dropped",
			"ServiceCIDRs "+fmt.Sprint(e.facts.ServiceCIDRs))
	case slices.Contains(e.facts.NodePortAddrs, at.Addr()):
		e.verdict.end(Elsewhere, NoService, fmt.Sprintf("no Service has node port %d: a process of node %s answers there, or nothing",
			at.Port(), e.facts.Node), "table of node "+e.facts.Node)
	default:
		e.verdict.Answer, e.verdict.Cause = Elsewhere, NoService
		e.verdict.add(at.Addr().String()+" is no address of a Service"+e.objects.podAt(at.Addr()), "API server: Services")
	}
}

// owned is for an address of a Service that does not have the port.
func (e *explaining) owned(at netip.AddrPort) bool {
	text := at.Addr().String()
	for _, s := range e.objects.Services {
		cluster := slices.Contains(s.Spec.ClusterIPs, text) || s.Spec.ClusterIP == text
		outer := slices.Contains(s.Spec.ExternalIPs, text) ||
			slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == text })
		if !cluster && !outer {
			continue
		}
		var ports []string
		for _, p := range s.Spec.Ports {
			ports = append(ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
		}
		n := svc.NameOf(s)
		if outer && v1.Proxied(s) && slices.ContainsFunc(s.Spec.Ports, e.question.atPort) {
			e.proxied(s, at)
			return true
		}
		answer, what := Refused, "refused"
		if !cluster {
			answer, what = Elsewhere, "left to the node itself"
		}
		e.verdict.Service = n.String()
		e.verdict.end(answer, NoService, fmt.Sprintf("Service %s has no port %d (it has %s): what is sent there is %s", n, at.Port(),
			strings.Join(ports, ", "), what), about("Service", n, "spec.ports"))
		return true
	}
	return false
}

// atPort reports whether a port of a Service is the one asked about.
func (q *Question) atPort(p corev1.ServicePort) bool {
	proto := q.Protocol
	return p.Port == int32(q.Address.Port()) &&
		(proto == 0 || cmp.Or(p.Protocol, corev1.ProtocolTCP) == corev1.Protocol(proto.String()))
}

// proxied is for an address whose connections end at the node that announces it: no table has it.
func (e *explaining) proxied(s *corev1.Service, at netip.AddrPort) {
	n, c := svc.NameOf(s), &e.question.Client
	e.verdict.Service = n.String()
	if l, nobody := e.objects.Unannounced[at.Addr().String()]; nobody && c.Node == "" && c.Addr(at.Addr()).IsValid() {
		e.verdict.end(Dropped, NoRoute, l.Text+": connections to it end nowhere", l.Source)
		return
	} else if nobody {
		e.verdict.add(l.Text+": connections of clients outside of all nodes to it end nowhere", l.Source)
	}
	e.verdict.end(Sent, "", "its connections end at the node that announces it, in the proxied way",
		about("Service", n, "status.loadBalancer.ingress"))
	reading := claim.Read(s)
	if wrong := reading.Wrong(); wrong != "" {
		e.verdict.add("nodes serve its last valid settings, if there were any: "+wrong, about("Service", n, "metadata.annotations"))
		return
	}
	client, ranges := c.Addr(at.Addr()), reading.Spec.SourceRanges
	switch source := rangesField(n, reading); {
	case len(ranges) == 0:
	case !client.IsValid():
		e.verdict.add(fmt.Sprintf("only clients in %v are let in; name one with --from", ranges), source)
	case reading.Spec.Admits(client):
		e.verdict.add(fmt.Sprintf("client %s is let in, by %v", client, ranges), source)
	default:
		e.verdict.end(Refused, SourceRange, fmt.Sprintf("client %s is not in %v: its connection is closed before any answer", client, ranges),
			source)
	}
}

// rangesField is the source of the ranges that a load balancer of the proxied way lets in.
func rangesField(n svc.Name, r *dialect.Reading) string {
	from := r.Origins[dialect.FieldSourceRanges].From
	if !strings.HasPrefix(from, "spec.") {
		from = "annotation " + from
	}
	return about("Service", n, from)
}

func (o *Objects) podAt(a netip.Addr) string {
	for _, p := range o.Pods {
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == a.String() }) {
			return "; Pod " + svc.NameOf(p).String() + " has it"
		}
	}
	return ""
}
