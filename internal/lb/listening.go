package lb

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Listening serves the Services of the proxied way on a node that announces no address, since others route them
// there. Beside that a node needs nothing for an address: it votes on none, and no other node has to know it.
type Listening struct {
	client   kubernetes.Interface
	known    *known
	proxying *proxying
	events   *events.Recorder
	registry *prometheus.Registry
}

// NewListening returns a Listening that does nothing before Run. Of the options it uses those of the proxied way.
func NewListening(o SpeakerOptions) (*Listening, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	config := rest.CopyConfig(o.Config)
	config.QPS, config.RateLimiter = -1, nil // the limit is the API server's priority and fairness
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of load balancers: %w", err)
	}
	l := &Listening{client: client, proxying: newProxying(o, client), registry: prometheus.NewRegistry()}
	l.known = newKnown(o.NodeName, l.proxying)
	l.events = events.NewRecorder(client, corev1.EventSource{Component: "fairlead-lb-speaker", Host: o.NodeName}, o.Log)
	l.proxying.served, l.proxying.events = func() {}, l.events
	l.proxying.register(l.registry)
	return l, nil
}

// Collector returns the metrics.
func (l *Listening) Collector() prometheus.Collector { return l.registry }

// Run serves until ctx ends.
func (l *Listening) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer l.events.Start()()
	follow := reflector.Quiet(ctx)
	core, k := l.client.CoreV1(), l.known
	self := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, k.node).String()}
	ours := metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + ManagedBy}
	run(follow, &running, "claims", reflector.From(l.client.NetworkingV1().IPAddresses(), ours), sink(k, k.setClaim, k.dropClaim))
	run(follow, &running, "services", reflector.From(core.Services(""), metav1.ListOptions{}), sink(k, k.setService, k.dropService))
	run(follow, &running, "node", reflector.From(core.Nodes(), self), sink(k, k.setNode, func(svc.Name) { k.setNode(nil) }))
	l.proxying.run(ctx)
	return nil
}

// register adds the metrics of the proxied way.
func (p *proxying) register(registry *prometheus.Registry) {
	registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "fairlead_lb_speaker_rejected_connections_total",
		Help: "Connections of the proxied way that were closed since there were too many.",
	}, func() float64 { return float64(p.server.Rejected()) }))
	registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "fairlead_lb_speaker_panics_total",
		Help: "Connections, requests and datagrams of the proxied way that were dropped after a panic of what served them.",
	}, func() float64 { return float64(p.server.Panics()) }))
	p.registerLogMetrics(registry)
}
