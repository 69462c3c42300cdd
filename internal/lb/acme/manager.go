package acme

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/acme/nsupdate"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Manager.
type Options struct {
	Client kubernetes.Interface
	Log    *slog.Logger
	// Event records an Event about a Service, or about what a Request is of.
	Event func(of runtime.Object, eventType, reason, text string)
	// Directory is the URL of the authority's directory, Email the contact that it may write to (may be empty), and
	// Roots the authorities of its server's certificate, nil for the system's.
	Directory, Email string
	Roots            *x509.CertPool
	// Binding binds the account to another one at the authority (RFC 8555, 7.3.4), without a KeyID to none.
	Binding Binding
	// Domains are the domains that certificates are ordered for.
	Domains []Domain
	// Limits bound all namespaces together.
	Limits Limits
	// Account is the Secret with the account's key, which is made if it does not exist.
	Account svc.Name
	// Wanted returns which certificate a Service wants; no hosts if it wants none, or cannot be reached yet.
	Wanted func(*corev1.Service) Want
	// DNS updates the zones of DNS-01; nil for none.
	DNS *nsupdate.Updater
	// Propagation is how long nodes have to answer a challenge before the authority is asked to look (default 10 s), which
	// may still fail: this process cannot check, since it may be unable to reach the address.
	Propagation time.Duration
}

// Want is a certificate that a Service wants.
type Want struct {
	// Hosts are sorted.
	Hosts []string
	// Secret is the name of the one that gets it, and Challenge that of package dialect, empty for TLS-ALPN-01.
	Secret, Challenge string
}

// Binding names an account that the authority knows by other means.
type Binding struct {
	KeyID string
	Key   []byte // of the HMAC
}

// Domain is a domain with all that is below it, for some namespaces, or all without any.
type Domain struct {
	Name       string
	Namespaces []string
}

// allows reports whether a namespace may have a certificate for a host.
func allows(domains []Domain, namespace, host string) bool {
	return slices.ContainsFunc(domains, func(d Domain) bool {
		return within(host, d.Name) && (len(d.Namespaces) == 0 || slices.Contains(d.Namespaces, namespace))
	})
}

// Manager orders certificates, and renews them.
type Manager struct {
	o      Options
	wake   loop.Signal
	client authority
	ledger *ledger
	// transport carries requests to the authority.
	transport http.RoundTripper

	mu      sync.Mutex
	changed func() // of Notify
	items   map[itemKey]*item
	busy    map[string]bool // namespaces in which an order is worked on
	budgets map[string]*budget
}

// item is a certificate that is wanted.
type item struct {
	Want
	owner *owner
	state State // guarded by the Manager's mu
	due   time.Time
	event string // recorded last
	// failures counts orders that have failed, also if the Secret cannot be written.
	failures int
	// unsaved is a certificate that was issued while its Secret could not be written.
	unsaved *state
	// window is when the authority wants its certificate to be renewed, nil before it is asked.
	window *window
	// counted is true once the certificate that the Secret had at first is in the ledger.
	counted bool
}

const (
	// maxOrders is how many orders are worked on at a time; of a namespace it is one, so that a tenant whose names cannot be
	// verified does not hold up the others.
	maxOrders = 8
	// orderTimeout bounds one.
	orderTimeout = 3 * time.Minute
	// apiRetry is how long an order waits for the API server.
	apiRetry = 10 * time.Second
	// recheck is how often a Secret is looked at that has nothing to be done: it may have been deleted.
	recheck = time.Hour
)

// New returns a Manager that does nothing before Run.
func New(o Options) *Manager {
	o.Propagation = cmp.Or(o.Propagation, 10*time.Second)
	return &Manager{o: o, wake: loop.NewSignal(), items: map[itemKey]*item{}, busy: map[string]bool{},
		budgets: map[string]*budget{}, ledger: newLedger(o.Limits, o.Domains),
		transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{RootCAs: o.Roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout: 10 * time.Second, IdleConnTimeout: time.Minute, MaxIdleConnsPerHost: maxOrders,
		}}
}

// Run orders until ctx ends, and returns when everything that it started has ended.
func (m *Manager) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	sink := reflector.Sink[*corev1.Service]{
		Replace: func(list []*corev1.Service) {
			m.mu.Lock()
			gone := maps.Clone(m.items)
			maps.DeleteFunc(m.items, func(key itemKey, _ *item) bool { return !key.front })
			for _, o := range list {
				m.setLocked(o, gone[itemKey{Name: svc.NameOf(o)}])
			}
			m.mu.Unlock()
		},
		Set: func(o *corev1.Service) {
			m.mu.Lock()
			m.setLocked(o, m.items[itemKey{Name: svc.NameOf(o)}])
			m.mu.Unlock()
		},
		Delete: func(o *corev1.Service) {
			m.mu.Lock()
			delete(m.items, itemKey{Name: svc.NameOf(o)})
			m.mu.Unlock()
		},
	}
	running.Go(func() {
		reflector.Run(ctx, "lb/acme", reflector.From(m.o.Client.CoreV1().Services(""), metav1.ListOptions{}), sink)
	})
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-timer.C:
		}
		timer.Reset(m.begin(ctx, &running, time.Now()))
	}
}

// setLocked takes over what a Service wants. was is what it wanted before, or nil.
func (m *Manager) setLocked(o *corev1.Service, was *item) {
	want, key := m.o.Wanted(o), itemKey{Name: svc.NameOf(o)}
	if len(want.Hosts) == 0 {
		delete(m.items, key)
		return
	}
	m.items[key] = was.renewed(want, ownerOf(o))
	m.poke()
}

func (m *Manager) poke() {
	m.wake.Set()
}

// begin works on what is due, and returns after how long something else is.
func (m *Manager) begin(ctx context.Context, running *sync.WaitGroup, now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := now.Add(recheck)
	var due []*item
	for _, it := range m.items {
		if it.due.After(now) {
			next = earlier(next, it.due)
		} else {
			due = append(due, it)
		}
	}
	maps.DeleteFunc(m.budgets, func(namespace string, b *budget) bool { return !m.busy[namespace] && b.decay(now) == 0 })
	slices.SortFunc(due, func(a, b *item) int { return cmp.Or(a.due.Compare(b.due), a.owner.name.Compare(b.owner.name)) })
	for _, it := range due {
		namespace, object := it.owner.name.Namespace, it.owner
		if m.busy[namespace] || len(m.busy) == maxOrders {
			continue // its end wakes the loop
		}
		m.busy[namespace] = true
		running.Go(func() {
			wait := m.sync(ctx, it, object)
			m.mu.Lock()
			it.due = time.Now().Add(wait)
			delete(m.busy, namespace)
			m.mu.Unlock()
			m.poke()
		})
	}
	return next.Sub(now)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// sync brings the Secret of an item up to date, and returns after how long to check it again.
func (m *Manager) sync(ctx context.Context, it *item, o *owner) time.Duration {
	for _, host := range it.Hosts {
		if why := m.refusal(it, o.name.Namespace, host); why != "" {
			m.warn(it, o, "ACMEHostNotAllowed", "no certificate is ordered: "+why)
			return recheck // only a restart changes that
		}
	}
	secret, err := m.o.Client.CoreV1().Secrets(o.name.Namespace).Get(ctx, it.Secret, metav1.GetOptions{})
	st := &state{}
	switch {
	case apierrors.IsNotFound(err):
		if st, err = standIn(); err == nil {
			err = m.apply(ctx, o, it, st)
		}
	case err == nil && !isOurs(secret, o):
		return m.taken(it, o)
	case err == nil:
		st = stateOf(secret, it.Hosts)
	}
	if err != nil {
		return m.cannotKeep(ctx, it, o, err)
	}
	if it.unsaved != nil {
		return m.store(ctx, it, o)
	}
	now := time.Now()
	leaf := st.leaf(it.Hosts)
	if leaf != nil && !it.counted {
		m.ledger.found(o.name.Namespace, it.Hosts, leaf.NotBefore, now)
	}
	it.counted = true
	if leaf != nil {
		m.setState(it, func(s *State) { *s = stateOfLeaf(leaf, now) })
		at, next := m.renewalOf(ctx, it, leaf, now)
		if now.Before(at) {
			return min(at.Sub(now), max(next.Sub(now), askSoonest), recheck)
		}
	}
	if now.Before(st.after) {
		m.setState(it, func(s *State) { s.waits(st.after) })
		return min(st.after.Sub(now), recheck)
	}
	if wait := m.budgetOf(o.name.Namespace).wait(now); wait > 0 {
		m.warn(it, o, "ACMEOrderDelayed", fmt.Sprintf("no certificate is ordered before %s: namespace %s has had too many ordered within an hour",
			now.Add(max(wait, apiRetry)).UTC().Format(time.RFC3339), o.name.Namespace))
		return max(wait, apiRetry)
	}
	granted, wait, why := m.ledger.take(o.name.Namespace, it.Hosts, leaf != nil && it.window.replaces() != "", now)
	if granted == nil {
		wait = max(wait, apiRetry)
		m.warn(it, o, "ACMEOrderDelayed", fmt.Sprintf("no certificate is ordered before %s: namespace %s has its part of what all namespaces "+
			"together may have: %s (--lb-acme-limits)", now.Add(wait).UTC().Format(time.RFC3339), o.name.Namespace, why))
		return min(wait, recheck)
	}
	return m.order(ctx, it, o, st, granted)
}

// budgetOf returns the budget of a namespace, which only the order that is worked on there uses.
func (m *Manager) budgetOf(namespace string) *budget {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.budgets[namespace]
	if b == nil {
		b = &budget{at: time.Now()}
		m.budgets[namespace] = b
	}
	return b
}

// warn records a Warning, once for each change.
func (m *Manager) warn(it *item, o *owner, reason, text string) {
	if it.event != text {
		it.event = text
		m.o.Event(o.object, corev1.EventTypeWarning, reason, text)
	}
	m.setState(it, func(s *State) { s.Reason, s.Text = reason, text })
}

// taken reports a Secret that is not ours.
func (m *Manager) taken(it *item, o *owner) time.Duration {
	m.warn(it, o, "ACMESecretTaken",
		"no certificate is ordered: the Secret "+it.Secret+" was not made for that, or has been changed; remove it, or name another one")
	return time.Minute
}

// cannotKeep reports an error of the API server about the Secret of a Service. Its text only goes to the log: tenants read
// the Event.
func (m *Manager) cannotKeep(ctx context.Context, it *item, o *owner, err error) time.Duration {
	wait := apiRetry
	switch {
	case ctx.Err() != nil:
		return wait
	case apierrors.IsConflict(err), apierrors.IsInvalid(err):
		wait = m.taken(it, o)
	case apierrors.IsForbidden(err):
		m.warn(it, o, "ACMESecretForbidden", "no certificate is ordered: the controller may not keep the Secret "+it.Secret)
		wait = time.Minute
	}
	m.o.Log.Warn("cannot keep the Secret of a certificate; retrying", "service", o.name, "secret", it.Secret, "after", wait, "err", err)
	return wait
}
