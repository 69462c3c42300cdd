package epslice

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// The limits of endpoints in one slice (behaviour 28).
const (
	DefaultMaxEndpoints = 100
	LargestMaxEndpoints = 1000
)

// Input is everything that the slices of one Service depend on.
type Input struct {
	Service *corev1.Service
	// Pods are those the Service selects, in any order.
	Pods []*corev1.Pod
	// Node returns the named Node, or nil.
	Node func(name string) *corev1.Node
	// Present are the slices of the Service's namespace that carry its name
	// and the label ManagedBySelector, whoever owns them.
	Present []*discoveryv1.EndpointSlice
	// TakenNames may not be given to new slices: other objects have them.
	TakenNames []string
	// MaxEndpoints of a slice; 0 is DefaultMaxEndpoints.
	MaxEndpoints int
	// Trigger is the time of the change that is planned for; zero if unknown.
	Trigger time.Time
	// Topology is that of the nodes, for Services that ask for topology-aware
	// hints; nil ignores the request. Hinted is whether the previous plan had
	// hints.
	Topology *Topology
	Hinted   bool
}

// Plan is what to write. Slices in Update and Delete carry the resource version
// of the slice they replace.
type Plan struct {
	Create, Update, Delete []*discoveryv1.EndpointSlice
	// MissingNodes are Nodes that selected Pods name and that do not exist.
	// Such Pods are left out until the Node appears, except where not ready
	// addresses are published as well.
	MissingNodes []string
	// Events are to be recorded on the object that the plan is for.
	Events []Event
	// Hints counts the endpoints hinted to each zone for Services with
	// topology-aware hints, as the argument of Topology.Overloaded.
	Hints map[discoveryv1.AddressType]map[string]int
}

// Empty reports whether nothing is to be written.
func (p *Plan) Empty() bool { return len(p.Create)+len(p.Update)+len(p.Delete) == 0 }

// Event is an Event to record on the object of a plan: of type Warning, or Normal.
type Event struct {
	Warning         bool
	Reason, Message string
}

// Slices plans the EndpointSlices of a Service with a selector: one set of
// slices for each address family and each set of resolved ports and weight, at
// least one slice for each family. The plan has the fewest writes that make the slices
// right: endpoints stay in their slice, slices that are written anyway are
// filled first, slices that would be deleted are used again, then one that has
// room, and only then new ones. A Service being deleted gets no new slices.
func Slices(in Input) *Plan {
	p := &planner{
		in:        &in,
		max:       in.MaxEndpoints,
		owner:     owner{namespace: in.Service.Namespace, name: in.Service.Name, uid: in.Service.UID, kind: "Service"},
		labels:    wantedLabels(in.Service, ManagedBySelector),
		hints:     hintModeOf(&in),
		resolver:  newPortResolver(in.Service),
		nodes:     map[string]*nodeFacts{},
		plan:      &Plan{},
		condition: [2]bool{false, true},
	}
	if p.max <= 0 {
		p.max = DefaultMaxEndpoints
	}
	p.names = namer{owner: p.owner, taken: map[string]bool{}}
	for _, name := range in.TakenNames {
		p.names.taken[name] = true
	}
	present := map[discoveryv1.AddressType][]*discoveryv1.EndpointSlice{}
	for _, s := range in.Present {
		p.names.taken[s.Name] = true
		present[s.AddressType] = append(present[s.AddressType], s)
	}
	p.collectPods()
	types := addressTypes(in.Service)
	for _, t := range types {
		p.family(t, present[t])
		delete(present, t)
	}
	for _, t := range slices.Sorted(maps.Keys(present)) {
		p.plan.Delete = append(p.plan.Delete, present[t]...)
	}
	p.addEvents()
	return p.plan
}

// planner holds the facts of one call of Slices.
type planner struct {
	in       *Input
	max      int
	owner    owner
	labels   map[string]string
	hints    hintMode
	names    namer
	resolver *portResolver
	nodes    map[string]*nodeFacts
	pods     []podFacts
	room     room
	badIPs   []string
	// badWeights are the Pods whose weight is not one.
	badWeights []string
	plan       *Plan
	condition  [2]bool // what the condition pointers of endpoints point to
}

// podFacts is a Pod that counts, with its resolved ports and Node.
type podFacts struct {
	pod    *corev1.Pod
	ips    []corev1.PodIP
	ports  *portSet
	weight string // as of weightOf
	node   *nodeFacts
	ready  bool
}

// room is memory for the endpoints of one family, taken at once.
type room struct {
	endpoints []discoveryv1.Endpoint
	refs      []corev1.ObjectReference
	addresses []string
}

func newRoom(n int) room {
	return room{make([]discoveryv1.Endpoint, n), make([]corev1.ObjectReference, n), make([]string, 0, n)}
}

func (r *room) endpoint() (*discoveryv1.Endpoint, *corev1.ObjectReference) {
	e, ref := &r.endpoints[0], &r.refs[0]
	r.endpoints, r.refs = r.endpoints[1:], r.refs[1:]
	return e, ref
}

type nodeFacts struct {
	exists bool
	name   string
	zone   *string
}

func (p *planner) collectPods() {
	missing := map[string]bool{}
	p.pods = make([]podFacts, 0, len(p.in.Pods))
	for _, pod := range p.in.Pods {
		if !Counts(pod) {
			continue
		}
		f := podFacts{pod: pod, ips: podIPs(pod), ports: p.resolver.of(pod), node: p.node(pod.Spec.NodeName), ready: Ready(pod)}
		var ok bool
		if f.weight, ok = weightOf(pod); !ok {
			p.badWeights = append(p.badWeights, pod.Name)
		}
		if !f.node.exists {
			missing[pod.Spec.NodeName] = true
		}
		p.pods = append(p.pods, f)
	}
	p.plan.MissingNodes = slices.Sorted(maps.Keys(missing))
}

func (p *planner) node(name string) *nodeFacts {
	if f, ok := p.nodes[name]; ok {
		return f
	}
	f := &nodeFacts{name: name}
	if node := p.in.Node(name); node != nil {
		f.exists = true
		if zone := node.Labels[corev1.LabelTopologyZone]; zone != "" {
			f.zone = &zone
		}
	}
	p.nodes[name] = f
	return f
}

// groups sorts the Pods' endpoints of one family by their ports and weights. Pods of a
// Node that does not exist make a group, but are not in it.
func (p *planner) groups(t discoveryv1.AddressType) map[portKey]*group {
	groups := map[portKey]*group{}
	p.room = newRoom(len(p.pods))
	for i := range p.pods {
		f := &p.pods[i]
		key := f.ports.key.weighted(f.weight)
		g := groups[key]
		if g == nil {
			g = &group{ports: f.ports, weight: f.weight, want: make(map[endpointKey]*discoveryv1.Endpoint, len(p.pods))}
			groups[key] = g
		}
		if !f.node.exists && !p.in.Service.Spec.PublishNotReadyAddresses {
			continue
		}
		if e := p.endpoint(f, t); e != nil {
			g.want[keyOf(e)] = e
		}
	}
	return groups
}

// endpoint returns the Pod's endpoint of one family, or nil if it has no such
// address. A terminating Pod is never ready, however it answers its probe,
// unless not ready addresses are published.
func (p *planner) endpoint(f *podFacts, t discoveryv1.AddressType) *discoveryv1.Endpoint {
	begin := len(p.room.addresses)
	for _, ip := range f.ips {
		text, kind, ok := parseIP(ip.IP)
		if !ok {
			p.addBadIP(f.pod, ip.IP)
			continue
		}
		if kind == t {
			p.room.addresses = append(p.room.addresses, text)
		}
	}
	addresses := slices.Clip(p.room.addresses[begin:])
	if len(addresses) == 0 {
		return nil
	}
	pod := f.pod
	terminating := pod.DeletionTimestamp != nil
	ready := p.in.Service.Spec.PublishNotReadyAddresses || f.ready && !terminating
	e, ref := p.room.endpoint()
	*ref = corev1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	*e = discoveryv1.Endpoint{
		Addresses: addresses,
		Conditions: discoveryv1.EndpointConditions{
			Ready: p.bool(ready), Serving: p.bool(f.ready), Terminating: p.bool(terminating),
		},
		TargetRef: ref,
		Zone:      f.node.zone,
	}
	if pod.Spec.NodeName != "" {
		e.NodeName = &f.node.name
	}
	if name := hostname(p.in.Service, pod); name != "" {
		e.Hostname = &name
	}
	if ready {
		e.Hints = p.hints.of(e)
	}
	return e
}

func (p *planner) bool(b bool) *bool {
	if b {
		return &p.condition[1]
	}
	return &p.condition[0]
}

// addBadIP records an invalid address once, though each family reads it.
func (p *planner) addBadIP(pod *corev1.Pod, ip string) {
	text := fmt.Sprintf("%s (%q)", pod.Name, ip)
	if !slices.Contains(p.badIPs, text) {
		p.badIPs = append(p.badIPs, text)
	}
}

// addEvents adds the Events for what a user has to correct: named ports that Pods
// do not have, wrong weights and invalid addresses.
func (p *planner) addEvents() {
	for _, name := range slices.Sorted(maps.Keys(p.resolver.missing)) {
		p.plan.Events = append(p.plan.Events, Event{Warning: true, Reason: "TargetPortNotFound",
			Message: fmt.Sprintf("%d of %d selected pods have no container port named %q with the protocol of the service port; "+
				"name one, or set targetPort to a number",
				p.resolver.missing[name], len(p.pods), name)})
	}
	if len(p.badWeights) > 0 {
		slices.Sort(p.badWeights)
		p.plan.Events = append(p.plan.Events, Event{Warning: true, Reason: "InvalidWeight",
			Message: fmt.Sprintf("the annotation %s of %d selected pods is not a number from 0 to %d, and counts as 1: %s",
				svc.WeightAnnotation, len(p.badWeights), svc.MaxWeight, strings.Join(p.badWeights[:min(3, len(p.badWeights))], ", "))})
	}
	if len(p.badIPs) > 0 {
		slices.Sort(p.badIPs)
		p.plan.Events = append(p.plan.Events, Event{Warning: true, Reason: "InvalidPodIP",
			Message: fmt.Sprintf("%d selected pods have an invalid IP address and are left out: %s",
				len(p.badIPs), strings.Join(p.badIPs[:min(3, len(p.badIPs))], ", "))})
	}
}
