package front

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Listening serves the Services of the proxied way on a node that announces no address, since others route the addresses
// there. An address needs no vote of such a node, and no other node has to know it.
type Listening struct {
	node     string
	client   kubernetes.Interface
	front    *Front
	events   *events.Recorder
	registry *prometheus.Registry
	unlisted atomic.Int32 // kinds that have not been listed yet
}

// NewListening returns a Listening that does nothing before Run. Of o it replaces Client, which reaches the API by config,
// Events, Served and Listed.
func NewListening(config *rest.Config, o Options) (*Listening, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	client, err := kubernetes.NewForConfig(apiclient.Tuned(config, svc.Speaker))
	if err != nil {
		return nil, fmt.Errorf("client of load balancers: %w", err)
	}
	if o.Gateway, err = api.NewClient(apiclient.Tuned(config, svc.Speaker)); err != nil {
		return nil, fmt.Errorf("client of load balancers: %w", err)
	}
	l := &Listening{node: o.NodeName, client: client, registry: prometheus.NewRegistry()}
	l.events = events.NewRecorder(client, corev1.EventSource{Component: svc.Speaker, Host: o.NodeName}, o.Log)
	l.unlisted.Store(2)
	o.Client, o.Events, o.Served = client, l.events, nil
	o.Listed = func() bool { return l.unlisted.Load() <= 0 }
	l.front = New(o)
	l.front.Register(l.registry)
	return l, nil
}

// Collector returns the metrics.
func (l *Listening) Collector() prometheus.Collector { return l.registry }

// Run serves until ctx ends.
func (l *Listening) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer l.events.Start()()
	quiet := reflector.Quiet(ctx)
	core := l.client.CoreV1()
	claims := reflector.From(l.client.NetworkingV1().IPAddresses(), metav1.ListOptions{LabelSelector: claim.Selector})
	services := reflector.From(core.Services(""), metav1.ListOptions{})
	self := reflector.From(core.Nodes(), byName(l.node))
	running.Go(func() { reflector.Run(quiet, "lb-speaker/claims", claims, each(l.listed, l.setClaim, l.dropClaim)) })
	running.Go(func() {
		reflector.Run(quiet, "lb-speaker/services", services, each(l.listed, l.setService, l.front.DropService))
	})
	running.Go(func() { reflector.Run(quiet, "lb-speaker/node", self, each(func() {}, l.front.SetNode, l.dropNode)) })
	l.front.Run(ctx)
	return nil
}

// listed counts a kind as listed.
func (l *Listening) listed() {
	l.unlisted.Add(-1)
	l.front.Wake()
}

func (l *Listening) setClaim(o *networkingv1.IPAddress) {
	if c, ok := claim.Parse(o); ok {
		l.front.SetClaim(c.Addr, c.Services)
	}
}

func (l *Listening) dropClaim(n svc.Name) {
	if addr, err := netip.ParseAddr(n.Name); err == nil {
		l.front.SetClaim(addr, nil)
	}
}

func (l *Listening) setService(o *corev1.Service) {
	if svc.NameOf(o) == names.MeshService() {
		l.front.SetMesh()
	}
	if o.Spec.Type != corev1.ServiceTypeLoadBalancer {
		l.front.DropService(svc.NameOf(o))
		return
	}
	l.front.SetService(o)
}

func (l *Listening) dropNode(svc.Name) { l.front.SetNode(nil) }

// each returns a sink that calls set for each object, drop for each one that has disappeared, and listed once after the
// first list.
func each[T metav1.Object](listed func(), set func(T), drop func(svc.Name)) reflector.Sink[T] {
	have := map[svc.Name]struct{}{}
	first := sync.OnceFunc(listed)
	return reflector.Sink[T]{
		Replace: func(list []T) {
			next := make(map[svc.Name]struct{}, len(list))
			for _, o := range list {
				next[svc.NameOf(o)] = struct{}{}
				set(o)
			}
			for n := range have {
				if _, still := next[n]; !still {
					drop(n)
				}
			}
			have = next
			first()
		},
		Set: func(o T) {
			have[svc.NameOf(o)] = struct{}{}
			set(o)
		},
		Delete: func(o T) {
			delete(have, svc.NameOf(o))
			drop(svc.NameOf(o))
		},
	}
}

// Register adds the metrics of the proxied way.
func (f *Front) Register(registry *prometheus.Registry) {
	counter := func(name, help string, n func() uint64) {
		registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: "fairlead_lb_speaker_" + name, Help: help}, func() float64 { return float64(n()) }))
	}
	registry.MustRegister(f.server.Collector())
	counter("rejected_connections_total", "Connections of the proxied way that were closed since there were too many.", f.server.Rejected)
	counter("panics_total", "Connections, requests and datagrams of the proxied way that were dropped after a panic.", f.server.Panics)
	counter("access_log_dropped_files_total", "Files of access logs that were removed before they were uploaded, since there were too many.",
		f.server.DroppedLogs)
	counter("access_log_dropped_lines_total", "Lines of access logs that were dropped, since the reader of the standard output was too slow.",
		f.server.DroppedLines)
	if u := f.upload; u != nil {
		counter("access_log_stored_files_total", "Files of access logs that were uploaded.", u.Uploaded)
		counter("access_log_failed_uploads_total", "Uploads of access logs that have failed, and are retried.", u.Failed)
	}
}
