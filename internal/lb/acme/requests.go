package acme

import (
	"crypto/x509"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/svc"
)

// The labels of Secrets that were made here: a Secret without the label of who wants it is never written.
const (
	// serviceLabel is of one for a Service, and has its name.
	serviceLabel = "fairlead.dev/acme-service"
	// frontLabel is of one for a Gateway, a ListenerSet or Ingresses. Only one front of a namespace orders it.
	frontLabel = "fairlead.dev/acme-front"
)

// Request is a certificate that something else than a Service wants: a Gateway, a ListenerSet or an Ingress.
type Request struct {
	Want
	// Namespace is the one of the object and of the Secret.
	Namespace string
	// Of is what Events are about.
	Of runtime.Object
	// Addresses are where challenges are answered.
	Addresses []string
}

// Awaited is the reason of a State of which nothing else is known.
const Awaited = "Awaited"

// State is what has become of a certificate.
type State struct {
	// Issued is true while the Secret has a certificate of the authority for all hosts that has not ended.
	Issued bool
	// Reason is that of the last Event, or Awaited, and Text describes it, also a renewal that has failed.
	Reason, Text string
}

// itemKey names an item: a Service, or the Secret of a front.
type itemKey struct {
	front bool
	svc.Name
}

// owner is what wants a certificate. It does not change.
type owner struct {
	object runtime.Object
	name   svc.Name // in logs
	// label has the value mark on the Secrets that were made for it.
	label, mark string
	addresses   []string
}

func ownerOf(o *corev1.Service) *owner {
	out := &owner{object: o, name: svc.NameOf(o), label: serviceLabel, mark: o.Name}
	for _, in := range o.Status.LoadBalancer.Ingress {
		out.addresses = append(out.addresses, in.IP)
	}
	return out
}

func isOurs(s *corev1.Secret, o *owner) bool { return s.Labels[o.label] == o.mark }

// renewed returns the item for a certificate: it, unless that was another one, or nil.
func (it *item) renewed(want Want, by *owner) *item {
	if it == nil || !slices.Equal(it.Hosts, want.Hosts) || it.Secret != want.Secret || it.Challenge != want.Challenge {
		it = &item{Want: want, state: State{Reason: Awaited, Text: "the certificate is being ordered"}}
	}
	it.owner = by
	return it
}

// SetRequests sets the certificates to order in addition to the ones of Services. If two name one Secret, the first one counts.
func (m *Manager) SetRequests(all []Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := map[itemKey]*item{}
	for key, it := range m.items {
		if key.front {
			before[key] = it
			delete(m.items, key)
		}
	}
	fresh := false
	for i := range all {
		r := &all[i]
		key := itemKey{true, svc.Name{Namespace: r.Namespace, Name: r.Secret}}
		if m.items[key] != nil {
			continue
		}
		m.items[key] = before[key].renewed(r.Want, &owner{object: r.Of, name: key.Name, label: frontLabel, mark: "true", addresses: r.Addresses})
		fresh = fresh || m.items[key] != before[key]
	}
	if fresh {
		m.poke()
	}
}

// StateOf returns what has become of a certificate of SetRequests, by its Secret; the zero State if it is none.
func (m *Manager) StateOf(secret svc.Name) State {
	m.mu.Lock()
	defer m.mu.Unlock()
	if it := m.items[itemKey{true, secret}]; it != nil {
		return it.state
	}
	return State{}
}

// Notify has changed called after a State may have changed. It must not block, or call the Manager.
func (m *Manager) Notify(changed func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changed = changed
}

// setState changes the state of an item.
func (m *Manager) setState(it *item, change func(*State)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := it.state
	if change(&it.state); it.state != was && m.changed != nil {
		m.changed()
	}
}

func stateOfLeaf(leaf *x509.Certificate, now time.Time) State {
	until := leaf.NotAfter.UTC().Format(time.RFC3339)
	if now.After(leaf.NotAfter) {
		return State{Reason: "Expired", Text: "the certificate has ended at " + until}
	}
	return issuedUntil(until)
}

func issuedUntil(until string) State {
	return State{Issued: true, Reason: "Issued", Text: "the certificate is valid until " + until}
}

// waits notes when the next order is made, unless this process knows why not now.
func (s *State) waits(until time.Time) {
	if s.Reason == Awaited {
		s.Reason, s.Text = "ACMEOrderFailed", "an order has failed; the next one is made at "+until.UTC().Format(time.RFC3339)
	}
}
