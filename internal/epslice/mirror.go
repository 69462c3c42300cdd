package epslice

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fairlead/fairlead/internal/svc"
)

// DefaultMaxMirrored is how many addresses of one subset are mirrored.
const DefaultMaxMirrored = 1000

// Mirrored reports whether Endpoints are to be mirrored to slices: they are those
// of a Service without a selector, do not ask to be left alone, and are not the
// record of a leader election. Either may be nil.
func Mirrored(endpoints *corev1.Endpoints, service *corev1.Service) bool {
	if endpoints == nil || service == nil || len(service.Spec.Selector) > 0 {
		return false
	}
	return endpoints.Labels[discoveryv1.LabelSkipMirror] != "true" && !LeaderElection(endpoints)
}

// LeaderElection reports whether the object is the record of a leader election.
func LeaderElection(endpoints *corev1.Endpoints) bool {
	_, ok := endpoints.Annotations[resourcelock.LeaderElectionRecordAnnotationKey]
	return ok
}

// Mirror plans the slices that mirror Endpoints: one for each address family of
// each set of ports. present are the slices of the namespace with the name of
// the Endpoints as service name and the label ManagedByMirroring. No subset is
// mirrored beyond limit addresses; 0 is DefaultMaxMirrored.
func Mirror(endpoints *corev1.Endpoints, present []*discoveryv1.EndpointSlice, takenNames []string, limit int) *Plan {
	if limit <= 0 {
		limit = DefaultMaxMirrored
	}
	m := &mirror{
		endpoints: endpoints, limit: limit, plan: &Plan{}, groups: map[mirrorKey]*mirrorGroup{},
		owner: owner{namespace: endpoints.Namespace, name: endpoints.Name, uid: endpoints.UID, kind: "Endpoints"},
	}
	m.names = namer{owner: m.owner, taken: map[string]bool{}}
	for _, name := range takenNames {
		m.names.taken[name] = true
	}
	for _, s := range present {
		m.names.taken[s.Name] = true
	}
	m.labels = make(map[string]string, len(endpoints.Labels)+2)
	maps.Copy(m.labels, endpoints.Labels)
	m.labels[discoveryv1.LabelServiceName] = endpoints.Name
	m.labels[discoveryv1.LabelManagedBy] = ManagedByMirroring
	m.annotations = maps.Clone(endpoints.Annotations)
	delete(m.annotations, corev1.EndpointsLastChangeTriggerTime)
	delete(m.annotations, corev1.LastAppliedConfigAnnotation)
	// The right to write Endpoints is none to have nodes check addresses (package checks).
	maps.DeleteFunc(m.annotations, func(key, _ string) bool { return strings.HasPrefix(key, svc.CheckAnnotation) })
	m.collect()
	m.match(present)
	return m.plan
}

type mirrorKey struct {
	family discoveryv1.AddressType
	ports  portKey
}

type mirrorGroup struct {
	ports []discoveryv1.EndpointPort
	list  []discoveryv1.Endpoint
	index map[endpointKey]int
}

type mirror struct {
	endpoints   *corev1.Endpoints
	limit       int
	owner       owner
	names       namer
	labels      map[string]string
	annotations map[string]string
	groups      map[mirrorKey]*mirrorGroup
	plan        *Plan
}

// collect sorts the addresses by family and ports, with Events for those left out.
func (m *mirror) collect() {
	invalid, skipped := 0, 0
	for i := range m.endpoints.Subsets {
		s := &m.endpoints.Subsets[i]
		ports := make([]discoveryv1.EndpointPort, len(s.Ports))
		for j := range s.Ports {
			protocol := protocolOf(s.Ports[j].Protocol)
			ports[j] = discoveryv1.EndpointPort{
				Name: &s.Ports[j].Name, Port: &s.Ports[j].Port, Protocol: &protocol, AppProtocol: s.Ports[j].AppProtocol,
			}
		}
		key, added := portsKey(ports), 0
		add := func(list []corev1.EndpointAddress, ready bool) {
			for j := range list {
				if added >= m.limit {
					skipped += len(list) - j
					return
				}
				if m.add(&list[j], key, ports, ready) {
					added++
				} else {
					invalid++
				}
			}
		}
		add(s.Addresses, true)
		add(s.NotReadyAddresses, false)
	}
	if invalid > 0 {
		m.plan.Events = append(m.plan.Events, Event{Warning: true, Reason: "InvalidIPAddress",
			Message: fmt.Sprintf("Skipped %d invalid IP addresses when mirroring to EndpointSlices", invalid)})
	}
	if skipped > 0 {
		m.plan.Events = append(m.plan.Events, Event{Warning: true, Reason: "TooManyAddressesToMirror",
			Message: fmt.Sprintf("A max of %d addresses can be mirrored to EndpointSlices per Endpoints subset. %d addresses were skipped",
				m.limit, skipped)})
	}
}

func (m *mirror) add(a *corev1.EndpointAddress, ports portKey, list []discoveryv1.EndpointPort, ready bool) bool {
	text, t, ok := parseIP(a.IP)
	if !ok {
		return false
	}
	key := mirrorKey{t, ports}
	g := m.groups[key]
	if g == nil {
		g = &mirrorGroup{ports: list, index: map[endpointKey]int{}}
		m.groups[key] = g
	}
	e := discoveryv1.Endpoint{
		Addresses: []string{text}, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		TargetRef: a.TargetRef, NodeName: a.NodeName,
	}
	if a.Hostname != "" {
		e.Hostname = &a.Hostname
	}
	k := keyOf(&e)
	if at, ok := g.index[k]; ok {
		g.list[at] = e
		return true
	}
	if len(g.list) >= m.limit {
		return true // another subset with the same ports has filled the slice
	}
	g.index[k] = len(g.list)
	g.list = append(g.list, e)
	return true
}

// match finds the present slice of each group, uses slices of groups that are
// gone for new ones, and deletes the rest.
func (m *mirror) match(present []*discoveryv1.EndpointSlice) {
	present = slices.SortedFunc(slices.Values(present), func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	var spare []*discoveryv1.EndpointSlice
	matched := map[mirrorKey]*discoveryv1.EndpointSlice{}
	for _, s := range present {
		key := mirrorKey{s.AddressType, portsKey(s.Ports)}
		if m.groups[key] != nil && matched[key] == nil && m.owner.owns(s) {
			matched[key] = s
		} else {
			spare = append(spare, s)
		}
	}
	keys := slices.SortedFunc(maps.Keys(m.groups), func(a, b mirrorKey) int {
		if a.family != b.family {
			return strings.Compare(string(a.family), string(b.family))
		}
		return strings.Compare(string(a.ports), string(b.ports))
	})
	for _, key := range keys {
		g, old := m.groups[key], matched[key]
		if old == nil {
			at := slices.IndexFunc(spare, func(s *discoveryv1.EndpointSlice) bool { return s.AddressType == key.family && m.owner.owns(s) })
			if at >= 0 {
				old = spare[at]
				spare = slices.Delete(spare, at, at+1)
			}
		} else if m.unchanged(g, old) {
			continue
		}
		m.write(key, g, old)
	}
	m.plan.Delete = append(m.plan.Delete, spare...)
}

func (m *mirror) unchanged(g *mirrorGroup, s *discoveryv1.EndpointSlice) bool {
	if len(s.Endpoints) != len(g.list) || !maps.Equal(s.Labels, m.labels) || !maps.Equal(s.Annotations, m.annotations) {
		return false
	}
	for i := range s.Endpoints {
		at, ok := g.index[keyOf(&s.Endpoints[i])]
		if !ok || !sameEndpoint(&s.Endpoints[i], &g.list[at]) {
			return false
		}
	}
	return true
}

func (m *mirror) write(key mirrorKey, g *mirrorGroup, old *discoveryv1.EndpointSlice) {
	s := &discoveryv1.EndpointSlice{AddressType: key.family, Ports: g.ports, Endpoints: g.list}
	if old != nil {
		s.ObjectMeta = old.ObjectMeta
		m.plan.Update = append(m.plan.Update, s)
	} else {
		if m.endpoints.DeletionTimestamp != nil {
			return
		}
		s.Namespace = m.owner.namespace
		s.GenerateName, s.Name = m.names.next(key.family)
		s.OwnerReferences = m.owner.reference()
		m.plan.Create = append(m.plan.Create, s)
	}
	s.Labels, s.Annotations = m.labels, m.annotations
}
