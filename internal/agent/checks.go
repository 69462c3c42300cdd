package agent

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Checks checks endpoints of slices that ask for it (package checks), if this node is one of
// their checkers. The results are for the node's Lease.
type Checks struct {
	self    string
	client  kubernetes.Interface
	log     *slog.Logger
	events  *events.Recorder
	changed loop.Signal
	update  loop.Signal

	mu     sync.Mutex
	nodes  map[string]bool     // the ready endpoints
	own    map[checks.Key]bool // whether this node is to check it, as nodes are; nil if they have changed
	slices map[svc.Name]checkedSlice
	found  checks.Report
	// partly are the slices of which this node cannot check all, as their Events say.
	partly map[svc.Name]bool
}

// checkedSlice is what of a slice is checked.
type checkedSlice struct {
	object  *corev1.ObjectReference
	targets []checks.Target
}

// maxEvents bounds the Events of one look at the slices: the queue of a recorder holds a few hundred.
const maxEvents = 100

// NewChecks returns what checks endpoints for the node called self. Run does it.
func NewChecks(client kubernetes.Interface, self string, log *slog.Logger) *Checks {
	return &Checks{
		self: self, client: client, log: log, changed: loop.NewSignal(), update: loop.NewSignal(),
		events: events.NewRecorder(client, corev1.EventSource{Component: "fairlead-checks", Host: self}, log),
		nodes:  map[string]bool{}, slices: map[svc.Name]checkedSlice{}, found: checks.Report{}, partly: map[svc.Name]bool{},
	}
}

// Changed holds a token when Report may have changed since the last receive. It is for one receiver.
func (c *Checks) Changed() <-chan struct{} { return c.changed }

// Report returns the results as the value of the annotation svc.ChecksAnnotation.
func (c *Checks) Report() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.found.String()
}

// Set takes a Node as it is now.
func (c *Checks) Set(n *corev1.Node) {
	ready := slices.ContainsFunc(n.Status.Conditions, func(k corev1.NodeCondition) bool {
		return k.Type == corev1.NodeReady && k.Status == corev1.ConditionTrue
	})
	c.setNode(n.Name, ready)
}

// Unset takes the name of a Node that is no more.
func (c *Checks) Unset(name string) { c.setNode(name, false) }

func (c *Checks) setNode(name string, ready bool) {
	c.mu.Lock()
	differs := c.nodes[name] != ready
	if ready {
		c.nodes[name] = true
	} else {
		delete(c.nodes, name)
	}
	if differs {
		c.own = nil
	}
	c.mu.Unlock()
	if differs {
		c.update.Set()
	}
}

func (c *Checks) setSlice(s *discoveryv1.EndpointSlice, targets []checks.Target) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := svc.Name{Namespace: s.Namespace, Name: s.Name}
	if len(targets) == 0 {
		delete(c.slices, name)
		return
	}
	c.slices[name] = checkedSlice{targets: targets, object: &corev1.ObjectReference{
		APIVersion: discoveryv1.SchemeGroupVersion.String(), Kind: "EndpointSlice", Namespace: s.Namespace, Name: s.Name, UID: s.UID,
	}}
}

// Run checks until ctx ends, and always returns nil.
func (c *Checks) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer c.events.Start()()
	sink := reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func(all []*discoveryv1.EndpointSlice) {
			c.mu.Lock()
			clear(c.slices)
			c.mu.Unlock()
			for _, s := range all {
				c.setSlice(s, checks.Of(s))
			}
			c.update.Set()
		},
		Set:    func(s *discoveryv1.EndpointSlice) { c.setSlice(s, checks.Of(s)); c.update.Set() },
		Delete: func(s *discoveryv1.EndpointSlice) { c.setSlice(s, nil); c.update.Set() },
	}
	source := reflector.From(c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll), metav1.ListOptions{LabelSelector: svc.CheckedLabel})
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "checks/endpointslices", source, sink) })

	stops := map[checks.Key]context.CancelFunc{}
	defer func() {
		for _, stop := range stops {
			stop()
		}
	}()
	turn := time.NewTimer(checks.NextTurn(time.Now()))
	defer turn.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.update:
		case <-turn.C:
			turn.Reset(checks.NextTurn(time.Now()))
		}
		mine := c.mine()
		for key, stop := range stops {
			if _, still := mine[key]; !still {
				stop()
				delete(stops, key)
			}
		}
		for key, t := range mine {
			if stops[key] == nil {
				one, stop := context.WithCancel(ctx)
				stops[key] = stop
				running.Go(func() { c.keep(one, t) })
			}
		}
	}
}

// mine returns what this node checks, and forgets what it has found of the rest.
func (c *Checks) mine() map[checks.Key]checks.Target {
	c.mu.Lock()
	defer c.mu.Unlock()
	nodes := slices.Sorted(maps.Keys(c.nodes))
	before, out := c.own, map[checks.Key]checks.Target{}
	c.own = map[checks.Key]bool{}
	keys := map[string][]checks.Key{} // by namespace
	for name, s := range c.slices {
		for _, t := range s.targets {
			own, known := before[t.Key]
			if !known {
				own = slices.Contains(checks.By(t.Key, nodes), c.self)
			}
			if c.own[t.Key] = own; own {
				out[t.Key] = t
				keys[name.Namespace] = append(keys[name.Namespace], t.Key)
			}
		}
	}
	if len(out) > checks.MaxPerNode {
		taken := checks.Share(keys, checks.MaxPerNode, checks.Turn(time.Now()))
		maps.DeleteFunc(out, func(key checks.Key, _ checks.Target) bool { return !taken[key] })
	}
	c.reportPartly(out)
	for key := range c.found {
		if _, still := out[key]; !still {
			delete(c.found, key)
			c.changed.Set()
		}
	}
	return out
}

// reportPartly records and logs, when that changes, of which slices this node does not check all
// that it is one of the nodes for. The caller holds mu.
func (c *Checks) reportPartly(checked map[checks.Key]checks.Target) {
	before, recorded := len(c.partly), 0
	maps.DeleteFunc(c.partly, func(name svc.Name, _ bool) bool { return len(c.slices[name].targets) == 0 })
	for name, s := range c.slices {
		rest := 0
		for _, t := range s.targets {
			if _, is := checked[t.Key]; c.own[t.Key] && !is {
				rest++
			}
		}
		switch {
		case rest == 0:
			delete(c.partly, name)
		case !c.partly[name] && recorded < maxEvents:
			c.partly[name] = true
			recorded++
			c.events.Event(s.object, corev1.EventTypeWarning, "EndpointsNotChecked", fmt.Sprintf(
				"node %s cannot check %d of these endpoints: it checks %d at most, shared among namespaces; others can",
				c.self, rest, checks.MaxPerNode))
		}
	}
	switch {
	case before == 0 && len(c.partly) > 0:
		c.log.Warn("cannot check all endpoints that this node should check; see the Events EndpointsNotChecked of EndpointSlices",
			"checked", len(checked))
	case before > 0 && len(c.partly) == 0:
		c.log.Info("checking all endpoints again that this node should check", "checked", len(checked))
	}
}

// keep checks one endpoint until ctx ends. Nodes and endpoints do so at different times.
func (c *Checks) keep(ctx context.Context, t checks.Target) {
	tick := time.NewTimer(rand.N(min(t.Interval, time.Second)))
	defer tick.Stop()
	for failures := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		limited, cancel := context.WithTimeout(ctx, t.Timeout)
		err := check(limited, t)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
			c.answer(ctx, t, nil)
		} else if failures++; failures >= checks.Failures {
			c.answer(ctx, t, err)
		}
		tick.Reset(t.Interval)
	}
}

func (c *Checks) answer(ctx context.Context, t checks.Target, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, known := c.found[t.Key]
	if ctx.Err() != nil || known && was == (err == nil) {
		return
	}
	c.found[t.Key] = err == nil
	c.changed.Set()
	if err != nil {
		c.log.Warn("an endpoint does not answer its check; reporting it", "endpoint", t.Addr, "err", err)
	} else if known {
		c.log.Info("an endpoint that was reported answers its check again", "endpoint", t.Addr)
	}
}

// check asks once. Nothing of an answer but its status is used, so that a check is no way to read
// what a node can reach; redirects are not followed.
func check(ctx context.Context, t checks.Target) error {
	if h := t.Handler.HTTPGet; h != nil {
		u, err := url.Parse(h.Path)
		if err != nil {
			return err
		}
		u.Scheme, u.Host = strings.ToLower(string(h.Scheme)), netip.AddrPortFrom(t.Addr, uint16(h.Port.IntValue())).String()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return err
		}
		req.Header.Set("User-Agent", "kube-probe/fairlead")
		transport := &http.Transport{
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // as probes of Pods: the name in it is the Service's
		}
		res, err := transport.RoundTrip(req)
		if err != nil {
			return err
		}
		_ = res.Body.Close()
		if res.StatusCode < 200 || res.StatusCode >= 400 {
			return fmt.Errorf("the status is %d", res.StatusCode)
		}
		return nil
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(t.Addr, uint16(t.Handler.TCPSocket.Port.IntValue())).String())
	if err != nil {
		return err
	}
	return conn.Close()
}
