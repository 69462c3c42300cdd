package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// listed is one endpoint of an EndpointSlice, with its state there.
type listed struct {
	slice  *discoveryv1.EndpointSlice
	index  int
	port   uint16 // 0: the slice does not have the port
	addr   netip.Addr
	state  table.State
	weight int
	pod    *corev1.Pod
}

func (l *listed) endpoint() *discoveryv1.Endpoint { return &l.slice.Endpoints[l.index] }

func (l *listed) source(field string) string {
	return fmt.Sprintf("EndpointSlice %s/%s endpoints[%d].%s", l.slice.Namespace, l.slice.Name, l.index, field)
}

func (l *listed) terminating() bool {
	c := l.endpoint().Conditions.Terminating
	return c != nil && *c
}

func (l *listed) node() string {
	if n := l.endpoint().NodeName; n != nil {
		return *n
	}
	return ""
}

// listed returns the endpoints of a Service that its slices have for a port, in the order of the slices, as the node sees them.
func (o *Objects) listed(node string, n svc.Name, k table.Key, proto svc.Protocol) []listed {
	var out []listed
	for _, slice := range o.Slices {
		if slice.Namespace != n.Namespace || slice.Labels[discoveryv1.LabelServiceName] != n.Name || slice.AddressType != addressType(k.Family) {
			continue
		}
		weight, _ := svc.ParseWeight(slice.Annotations[svc.WeightAnnotation])
		number := portOf(slice, k.ID.Port, proto)
		for i := range slice.Endpoints {
			ep := &slice.Endpoints[i]
			a, bad := table.EndpointAddr(ep, k.Family)
			if bad != "" {
				continue
			}
			l := listed{slice: slice, index: i, port: number, addr: a, state: table.StateOf(ep, node), weight: weight}
			if ref := ep.TargetRef; ref != nil && ref.Kind == "Pod" {
				l.pod = o.pod(svc.Name{Namespace: slice.Namespace, Name: ref.Name})
			}
			out = append(out, l)
		}
	}
	return out
}

func addressType(f svc.Family) discoveryv1.AddressType {
	if f == svc.IPv6 {
		return discoveryv1.AddressTypeIPv6
	}
	return discoveryv1.AddressTypeIPv4
}

func portOf(slice *discoveryv1.EndpointSlice, name string, proto svc.Protocol) uint16 {
	for i := range slice.Ports {
		p := &slice.Ports[i]
		is, has := "", string(corev1.ProtocolTCP)
		if p.Name != nil {
			is = *p.Name
		}
		if p.Protocol != nil {
			has = string(*p.Protocol)
		}
		if is == name && has == proto.String() && p.Port != nil && *p.Port > 0 && *p.Port <= 65535 {
			return uint16(*p.Port)
		}
	}
	return 0
}

func (o *Objects) pod(n svc.Name) *corev1.Pod {
	for _, p := range o.Pods {
		if svc.NameOf(p) == n {
			return p
		}
	}
	return nil
}

// nothing finds the reason why a frontend has no endpoint although no policy hides any.
func (d *deciding) nothing() {
	name := d.port.ID.Name
	if d.question.Then {
		d.out.end(Refused, NoEndpoint, "it had no endpoint for new connections at that time; why is not known: nodes do not keep objects",
			"history of node "+d.facts.Node)
		return
	}
	all := d.objects.listed(d.facts.Node, name, d.port.Key(), d.port.Protocol)
	s := d.objects.find(name)
	if s == nil {
		d.out.end(Refused, NoService, "the Service does not exist any more", about("Service", name, ""))
		return
	}
	if len(all) == 0 {
		d.unlisted(s)
		return
	}
	var ready, idle, serving, unready, leaving []listed
	for _, l := range all {
		switch {
		case l.port == 0:
		case l.state.Is(table.Ready) && l.weight == 0:
			idle = append(idle, l)
		case l.state.Is(table.Ready):
			ready = append(ready, l)
		case l.state.Is(table.Draining):
			serving = append(serving, l)
		case l.terminating():
			leaving = append(leaving, l)
		default:
			unready = append(unready, l)
		}
	}
	switch {
	case len(ready)+len(idle)+len(serving)+len(unready)+len(leaving) == 0:
		d.out.end(Refused, WrongTargetPort, fmt.Sprintf("no endpoint has port %q: targetPort %s names no port of the Pods",
			d.port.ID.Port, d.targetPort(s)), d.targetField(s))
	case len(ready) > 0:
		d.stale(ready[0])
	case len(idle) > 0:
		d.out.end(Refused, WeightZero, fmt.Sprintf("all %d endpoints that are ready have weight 0", len(idle)),
			idle[0].weighted())
	case len(unready) > 0:
		text := fmt.Sprintf("none of %d endpoints is ready", len(unready)+len(leaving))
		d.out.end(Refused, Unready, text+d.objects.trouble(&unready[0]), unready[0].source("conditions.ready"))
	default:
		l := append(leaving, serving...)[0]
		d.out.end(Refused, Terminating, fmt.Sprintf("all %d endpoints are terminating", len(leaving)+len(serving)),
			l.source("conditions.terminating"))
	}
}

// stale is for endpoints that slices call ready and the node's table leaves out.
func (d *deciding) stale(l listed) {
	if len(d.facts.Problems) > 0 {
		d.out.end(Refused, NoEndpoint, strings.Join(d.facts.Problems, "; "), "node "+d.facts.Node)
		return
	}
	text := "node " + d.facts.Node + " does not use endpoints that are ready by their EndpointSlice: "
	if l.state.Is(table.Local) {
		text += "it knows that the Pod is not, or has not got the change yet"
	} else {
		text += "it has not got the change yet"
	}
	d.out.end(Refused, Unready, text, l.source("conditions.ready"))
}

// weighted is the source that names the weight: the Pod's annotation, or without a Pod that of the slice.
func (l *listed) weighted() string {
	const field = "annotation " + svc.WeightAnnotation
	if ref := l.endpoint().TargetRef; ref != nil && ref.Kind == "Pod" {
		return about("Pod", svc.Name{Namespace: l.slice.Namespace, Name: ref.Name}, field)
	}
	return about("EndpointSlice", svc.NameOf(l.slice), field)
}

// trouble is ": pod X, what is wrong with it", empty if that is not known.
func (o *Objects) trouble(l *listed) string {
	if l.pod == nil || o.PodTrouble == nil {
		return ""
	}
	return ": Pod " + l.pod.Name + ": " + o.PodTrouble(l.pod)
}

// unlisted is for a Service without a single endpoint.
func (d *deciding) unlisted(s *corev1.Service) {
	if len(s.Spec.Selector) == 0 {
		d.out.end(Refused, NoEndpoint, "the Service has no selector, and no EndpointSlice lists an endpoint for it", d.field("spec.selector"))
		return
	}
	var selected, leaving []*corev1.Pod
	for _, p := range d.objects.Pods {
		if !Selects(s, p) || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		if p.DeletionTimestamp != nil {
			leaving = append(leaving, p)
		} else {
			selected = append(selected, p)
		}
	}
	switch {
	case len(selected) > 0:
		text := fmt.Sprintf("none of %d Pods is an endpoint yet", len(selected))
		if d.objects.PodTrouble != nil {
			text += ": Pod " + selected[0].Name + ": " + d.objects.PodTrouble(selected[0])
		}
		d.out.end(Refused, Unready, text, about("Pod", svc.NameOf(selected[0]), "status"))
	case len(leaving) > 0:
		d.out.end(Refused, Terminating, fmt.Sprintf("all %d Pods are terminating", len(leaving)),
			about("Pod", svc.NameOf(leaving[0]), "metadata.deletionTimestamp"))
	default:
		d.out.end(Refused, NoEndpoint, "no Pod has the labels "+labelText(s.Spec.Selector), d.field("spec.selector"))
	}
}

// Selects reports whether a Service selects a Pod by its labels.
func Selects(s *corev1.Service, p *corev1.Pod) bool {
	for k, v := range s.Spec.Selector {
		if has, ok := p.Labels[k]; !ok || has != v {
			return false
		}
	}
	return p.Namespace == s.Namespace && len(s.Spec.Selector) > 0
}

func labelText(selector map[string]string) string {
	var out []string
	for k, v := range selector {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}

// targetPort is the targetPort of the Service's port, as the Service has it.
func (d *deciding) targetPort(s *corev1.Service) string {
	for i := range s.Spec.Ports {
		if p := &s.Spec.Ports[i]; p.Name == d.port.ID.Port {
			if p.TargetPort == (intstr.IntOrString{}) {
				return fmt.Sprint(p.Port)
			}
			return p.TargetPort.String()
		}
	}
	return "?"
}

func (d *deciding) targetField(s *corev1.Service) string {
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Name == d.port.ID.Port })
	return d.field(fmt.Sprintf("spec.ports[%d].targetPort", max(i, 0)))
}

// endpoints lists the endpoints of the ports asked about, and why each may or may not get connections.
func (e *explaining) endpoints() {
	if e.question.Then {
		e.endpointsThen()
		return
	}
	seen := map[netip.AddrPort]int{}
	for i := range e.facts.Ports {
		p := &e.facts.Ports[i]
		for _, l := range e.objects.listed(e.facts.Node, p.ID.Name, p.Key(), p.Protocol) {
			at := netip.AddrPortFrom(l.addr, l.port)
			k, has := seen[at]
			if !has {
				k, seen[at] = len(e.verdict.Endpoints), len(e.verdict.Endpoints)
				e.verdict.Endpoints = append(e.verdict.Endpoints, e.endpointOf(&l, at))
			}
			out := &e.verdict.Endpoints[k]
			e.policies(&l, at, p.Protocol, func(text, source string) { // once for each protocol
				if line := (Line{text, source}); !slices.Contains(out.Why, line) {
					out.Why = append(out.Why, line)
				}
			})
		}
	}
	slices.SortStableFunc(e.verdict.Endpoints, mayFirst)
}

// mayFirst orders endpoints: new connections may go to the first.
func mayFirst(a, b Endpoint) int {
	switch {
	case a.May && !b.May:
		return -1
	case b.May && !a.May:
		return 1
	}
	return 0
}

// endpointsThen lists the endpoints that the node had programmed; nodes do not remember others.
func (e *explaining) endpointsThen() {
	var all []netip.AddrPort
	for i := range e.verdict.Frontends {
		all = append(all, e.verdict.Frontends[i].Endpoints...)
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	for _, a := range slices.Compact(all) {
		e.verdict.Endpoints = append(e.verdict.Endpoints, Endpoint{Address: a.String(), May: true,
			Why: []Line{{"programmed at that time", "history of node " + e.facts.Node}}})
	}
}

func (e *explaining) endpointOf(l *listed, at netip.AddrPort) Endpoint {
	out := Endpoint{Address: at.String(), Node: l.node()}
	if l.pod != nil {
		out.Pod = l.pod.Name
	}
	for i := range e.verdict.Frontends {
		out.May = out.May || slices.Contains(e.verdict.Frontends[i].Endpoints, at)
	}
	say := func(text, source string) { out.Why = append(out.Why, Line{text, source}) }
	switch {
	case l.port == 0:
		say("it does not have the port", fmt.Sprintf("EndpointSlice %s/%s ports", l.slice.Namespace, l.slice.Name))
	case l.weight == 0:
		say("weight 0: no new connections", l.weighted())
	case l.state.Is(table.Ready) && out.May:
		say("ready", l.source("conditions.ready"))
	case l.state.Is(table.Ready):
		e.left(l, say)
	case l.state.Is(table.Draining):
		say("terminating and still serving: used when no endpoint is ready", l.source("conditions.terminating"))
	case l.terminating():
		say("terminating", l.source("conditions.terminating"))
	default:
		say("not ready"+e.objects.trouble(l), l.source("conditions.ready"))
	}
	if p, known := e.facts.probe(at); known && p.Result != Connected {
		say("it does not answer: "+p.Error, "connection from node "+e.facts.Node)
	}
	e.ofKernel(at, say)
	return out
}

// left adds the reason why an endpoint that is ready gets no connections.
func (e *explaining) left(l *listed, say func(text, source string)) {
	s := e.objects.find(e.target)
	local := s != nil && (s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal ||
		s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal)
	switch {
	case slices.Contains(e.facts.Unreached, l.node()):
		say(fmt.Sprintf("ready, but node %s does not reach node %s: it is the last choice", e.facts.Node, l.node()), "node "+e.facts.Node)
	case local && !l.state.Is(table.Local):
		field := "spec.externalTrafficPolicy"
		if s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
			field = "spec.internalTrafficPolicy"
		}
		say(fmt.Sprintf("ready, but on node %s: policy Local stays on node %s", l.node(), e.facts.Node), about("Service", e.target, field))
	case l.endpoint().Hints != nil:
		say("ready, but topology hints name other nodes or zones", l.source("hints"))
	default:
		say("ready, but no frontend leads there from this client", l.source("conditions.ready"))
	}
}
