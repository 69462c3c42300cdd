// Package certificates collects the certificates that the objects of a front have ordered by ACME. It is pure.
package certificates

import (
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of what is ordered. A certificate has as many hosts as its Secret has room for challenges, and the Service of the front names
// the Secrets in an annotation.
const (
	MaxHosts       = 20
	maxOfNamespace = 100
	maxOrders      = 1000
)

// Order is a certificate.
type Order struct {
	Secret    svc.Name
	Hosts     []string // sorted
	Challenge string
	// Answered is true if nodes answer the challenge.
	Answered bool
	// Kind and Of name the object that asks for it. Its namespace is the Secret's.
	Kind string
	Of   svc.Name
}

// Set are the certificates that a front has ordered. A nil Set has none.
type Set struct {
	orders map[svc.Name]*Order
	hosts  map[string]svc.Name // Secrets, by host
	counts map[string]int      // by namespace
}

// NewSet returns a Set without certificates.
func NewSet() *Set {
	return &Set{orders: map[svc.Name]*Order{}, hosts: map[string]svc.Name{}, counts: map[string]int{}}
}

// Add adds a certificate, or hosts to one with the same Secret. It returns why it does not, "" if it does. The first object that names a
// host decides about it.
func (s *Set) Add(o Order) (wrong string) {
	have := s.orders[o.Secret]
	var hosts []string
	if have != nil {
		hosts = have.Hosts
	}
	for _, h := range o.Hosts {
		if secret, known := s.hosts[h]; known && secret != o.Secret {
			if secret.Namespace != o.Secret.Namespace { // whose names are not shown here
				return fmt.Sprintf("the certificate for %s is ordered by another namespace", h)
			}
			return fmt.Sprintf("the certificate for %s is ordered for Secret %s", h, secret.Name)
		}
	}
	hosts = slices.Compact(slices.Sorted(slices.Values(slices.Concat(hosts, o.Hosts))))
	switch {
	case o.Secret.Namespace != o.Of.Namespace:
		return "a certificate is only kept in a Secret of the same namespace"
	case have != nil && have.Challenge != o.Challenge:
		return fmt.Sprintf("%s %s has the certificate of Secret %s ordered by %s", have.Kind, have.Of.Name, o.Secret.Name, have.Challenge)
	case len(hosts) > MaxHosts:
		return fmt.Sprintf("the certificate of Secret %s is for %d hosts; want %d at most", o.Secret.Name, len(hosts), MaxHosts)
	case have == nil && s.counts[o.Secret.Namespace] == maxOfNamespace:
		return fmt.Sprintf("the namespace has %d certificates ordered here; that is the most", maxOfNamespace)
	case have == nil && len(s.orders) == maxOrders:
		return fmt.Sprintf("%d certificates are ordered here; that is the most", maxOrders)
	}
	if have == nil {
		s.counts[o.Secret.Namespace]++
		have = &o
		s.orders[o.Secret] = have
	}
	have.Hosts = hosts
	for _, h := range hosts {
		s.hosts[h] = o.Secret
	}
	return ""
}

// All returns the certificates, by their Secrets.
func (s *Set) All() (out []Order) {
	if s == nil {
		return nil
	}
	for _, n := range slices.SortedFunc(maps.Keys(s.orders), svc.Name.Compare) {
		out = append(out, *s.orders[n])
	}
	return out
}

// In returns the Secrets of a namespace, or all for "", in order.
func (s *Set) In(namespace string) (out []svc.Name) {
	for _, o := range s.All() {
		if namespace == "" || o.Secret.Namespace == namespace {
			out = append(out, o.Secret)
		}
	}
	return out
}

// Empty reports whether no certificate is ordered.
func (s *Set) Empty() bool { return s == nil || len(s.orders) == 0 }

// Has reports whether a certificate is ordered for a Secret.
func (s *Set) Has(secret svc.Name) bool { return s != nil && s.orders[secret] != nil }

// Answering returns the Secrets with the answers to an authority that asks at a host, by the host. No other Secret may answer for it: its
// owner is not who has the host.
func (s *Set) Answering() map[string]svc.Name {
	out := map[string]svc.Name{}
	if s == nil {
		return out
	}
	for h, n := range s.hosts {
		if s.orders[n].Answered {
			out[h] = n
		}
	}
	return out
}
