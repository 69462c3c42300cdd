// Package membership keeps a DNS server listed behind the Service kube-dns while it is ready, and watches the other
// servers listed there.
package membership

import (
	"log/slog"
	"slices"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Service returns the name of the Service of the cluster's DNS servers.
func Service() svc.Name { return svc.Name{Namespace: svc.SystemNamespace, Name: svc.DNSService} }

// Members are the endpoints of kube-dns, as the API lists them.
type Members struct {
	// Changed is set when the result of Others may have changed.
	Changed loop.Signal

	self     *Self // nil if this server is not listed
	client   kubernetes.Interface
	log      *slog.Logger
	peers    loop.Signal // set when the result of neighbours may have changed
	reassert loop.Signal // set when a slice of this server may have changed

	mu     sync.Mutex
	slices map[string]serverSlice // by name
}

// New returns Members without endpoints. self is nil for a server that is not listed; client is needed
// by Publish, Withdraw and WatchPeers.
func New(self *Self, client kubernetes.Interface, log *slog.Logger) *Members {
	return &Members{
		self: self, client: client, log: log, slices: map[string]serverSlice{},
		Changed: loop.NewSignal(), peers: loop.NewSignal(), reassert: loop.NewSignal(),
	}
}

// Set records a new or changed EndpointSlice of the cluster. It ignores slices of other Services.
func (m *Members) Set(e *discoveryv1.EndpointSlice) {
	if e.Namespace != Service().Namespace {
		return
	}
	m.checkOwn(e.Name)
	if e.Labels[discoveryv1.LabelServiceName] != Service().Name {
		m.remove(e.Name)
		return
	}
	s := serverSliceOf(e)
	m.mu.Lock()
	old, known := m.slices[e.Name]
	m.slices[e.Name] = s
	m.mu.Unlock()
	if !known || !slices.Equal(old.ready, s.ready) {
		m.Changed.Set()
	}
	if !known || old.node != s.node || !slices.Equal(old.all, s.all) {
		m.peers.Set()
	}
}

// Delete records that an EndpointSlice of the cluster was deleted.
func (m *Members) Delete(n svc.Name) {
	if n.Namespace != Service().Namespace {
		return
	}
	m.checkOwn(n.Name)
	m.remove(n.Name)
}

func (m *Members) remove(name string) {
	m.mu.Lock()
	_, known := m.slices[name]
	delete(m.slices, name)
	m.mu.Unlock()
	if known {
		m.Changed.Set()
		m.peers.Set()
	}
}

// checkOwn wakes Publish if name is a slice of this server.
func (m *Members) checkOwn(name string) {
	if m.self.owns(name) {
		m.reassert.Set()
	}
}
