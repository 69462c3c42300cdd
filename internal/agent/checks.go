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
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Checks checks endpoints of slices that ask for it (package checks): those that this node is one
// of the nodes for. What it finds is for the node's Lease.
type Checks struct {
	self    string
	client  kubernetes.Interface
	log     *slog.Logger
	changed chan struct{}
	update  chan struct{}

	mu     sync.Mutex
	nodes  map[string]bool     // those that are ready
	own    map[checks.Key]bool // whether this node is to check it, as nodes are; nil if they have changed
	slices map[svc.Name][]checks.Target
	found  checks.Report
}

// NewChecks returns what checks endpoints for the node called self. Run does it.
func NewChecks(client kubernetes.Interface, self string, log *slog.Logger) *Checks {
	return &Checks{
		self: self, client: client, log: log, changed: make(chan struct{}, 1), update: make(chan struct{}, 1),
		nodes: map[string]bool{}, slices: map[svc.Name][]checks.Target{}, found: checks.Report{},
	}
}

// Changed holds a token when Report may have changed since the last receive. It is for one receiver.
func (c *Checks) Changed() <-chan struct{} { return c.changed }

// Report returns what was found, as the annotation checks.ReportAnnotation has it.
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
		signal(c.update)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run checks until ctx ends, and always returns nil.
func (c *Checks) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	set := func(s *discoveryv1.EndpointSlice, targets []checks.Target) {
		c.mu.Lock()
		defer c.mu.Unlock()
		name := svc.Name{Namespace: s.Namespace, Name: s.Name}
		if c.slices[name] = targets; len(targets) == 0 {
			delete(c.slices, name)
		}
	}
	sink := reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func(all []*discoveryv1.EndpointSlice) {
			c.mu.Lock()
			clear(c.slices)
			c.mu.Unlock()
			for _, s := range all {
				set(s, checks.Of(s))
			}
			signal(c.update)
		},
		Set:    func(s *discoveryv1.EndpointSlice) { set(s, checks.Of(s)); signal(c.update) },
		Delete: func(s *discoveryv1.EndpointSlice) { set(s, nil); signal(c.update) },
	}
	source := reflector.From(c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll), metav1.ListOptions{LabelSelector: checks.Label})
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "checks/endpointslices", source, sink) })

	stops := map[checks.Key]context.CancelFunc{}
	defer func() {
		for _, stop := range stops {
			stop()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.update:
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

// mine returns what this node is to check, and forgets what it has found of the rest.
func (c *Checks) mine() map[checks.Key]checks.Target {
	c.mu.Lock()
	defer c.mu.Unlock()
	nodes := slices.Sorted(maps.Keys(c.nodes))
	before, out := c.own, map[checks.Key]checks.Target{}
	c.own = map[checks.Key]bool{}
	for _, targets := range c.slices {
		for _, t := range targets {
			own, known := before[t.Key]
			if !known {
				own = slices.Contains(checks.By(t.Key, nodes), c.self)
			}
			if c.own[t.Key] = own; own {
				out[t.Key] = t
			}
		}
	}
	if n := len(out) - checks.MaxPerNode; n > 0 {
		c.log.Warn("cannot check all endpoints that this node is to check: the rest stay as they are", "checked", checks.MaxPerNode, "rest", n)
		keys := slices.SortedFunc(maps.Keys(out), func(a, b checks.Key) int { return slices.Compare(a[:], b[:]) })
		for _, key := range keys[checks.MaxPerNode:] {
			delete(out, key)
		}
	}
	for key := range c.found {
		if _, still := out[key]; !still {
			delete(c.found, key)
			signal(c.changed)
		}
	}
	return out
}

// keep checks one endpoint until ctx ends. Nodes and endpoints do so at times of their own.
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
	signal(c.changed)
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
