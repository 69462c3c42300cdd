// Package prestop answers the request that a kubelet sends, as the preStop hook of a container, before it ends the container:
// once no node sends the Pod new connections any more (docs/design/026-rollouts-on-any-kubernetes.md).
//
//	kubelet ─► Pod's address:port ─► rule of this node ─► Server ─► condition Drained of the Pod, or the bound
//
// The request asks only: it changes nothing, and its sender learns nothing but the time of the answer.
package prestop

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/runner/drain"
)

// Options configure a Server.
type Options struct {
	Client   kubernetes.Interface
	NodeName string
	// Port is the port of Pods at which kubelets ask.
	Port uint16
	// Wait bounds an answer, and so does half of the Pod's grace period, both from the request on.
	Wait time.Duration
	// Controlled reports whether a controller waits for nodes; without it nothing is waited for.
	Controlled func() bool
	Log        *slog.Logger
}

// Server answers the kubelet of this node.
type Server struct {
	opts    Options
	pods    *pods
	leads   *leads
	metrics *metrics
	events  *events.Recorder
	looks   flowcontrol.PassiveRateLimiter // of the API
}

const (
	// lookTimeout bounds a look at a Pod in the API.
	lookTimeout = 2 * time.Second
	// looksPerSecond and looksAtOnce bound the looks. One is needed only where the watch is later than the kubelet's.
	looksPerSecond = 50
	looksAtOnce    = 200
)

// New returns a Server for Run.
func New(o Options) *Server {
	return &Server{
		opts: o, pods: newPods(), leads: newLeads(o.NodeName), metrics: newMetrics(),
		events: events.NewRecorder(o.Client, corev1.EventSource{Component: "fairlead-proxy", Host: o.NodeName}, o.Log),
		looks:  flowcontrol.NewTokenBucketPassiveRateLimiter(looksPerSecond, looksAtOnce),
	}
}

// Follow returns a Sink for the EndpointSlices that the proxy serves, which passes them on.
func (s *Server) Follow(to reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
	return s.leads.follow(to)
}

// Run answers until ctx ends. What leads requests here stays: without a server they are refused at once, and the kubelet
// ends the container.
func (s *Server) Run(ctx context.Context) error {
	defer s.events.Start()()
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	own := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", s.opts.NodeName).String()}
	wg.Go(func() {
		reflector.Run(reflector.Quiet(watching), "preStop/pods", reflector.From(s.opts.Client.CoreV1().Pods(""), own), s.pods.sink())
	})
	wg.Go(func() { s.lead(watching) })
	s.listen(ctx) // requests that wait when ctx ends go on for a while, and so do the watches
	return nil
}

// outcome is how a request was answered.
type outcome string

// The outcomes.
const (
	// drained: no node sends the Pod new connections.
	drained outcome = "drained"
	// late: not all nodes reported that within the bound.
	late outcome = "late"
	// unselected: no Service leads to the Pod.
	unselected outcome = "unselected"
	// restarted: the Pod is not being deleted; only a container ends.
	restarted outcome = "restarted"
	// uncontrolled: no controller waits for nodes.
	uncontrolled outcome = "uncontrolled"
	// unknown: no Pod of this node has the address.
	unknown outcome = "unknown"
	// failed: the API does not show whether the Pod is being deleted.
	failed outcome = "failed"
	// busy: too many requests.
	busy outcome = "busy"
	// canceled: the client did not wait for the answer.
	canceled outcome = "canceled"
)

var outcomes = []outcome{drained, late, unselected, restarted, uncontrolled, unknown, failed, busy, canceled}

// status is the HTTP status of an answer. A kubelet reads only whether one came.
func (o outcome) status() int {
	switch o {
	case unknown:
		return http.StatusNotFound
	case busy, failed:
		return http.StatusServiceUnavailable
	default:
		return http.StatusOK
	}
}

// answer returns when the Pod with an address may end, for a request that came at begin.
func (s *Server) answer(ctx context.Context, at netip.Addr, begin time.Time) outcome {
	p, now, ok := s.pods.enter(at)
	if p == nil {
		return unknown
	}
	if !ok {
		return busy
	}
	defer s.pods.leave(p)
	if !now.ending {
		var result outcome
		if now, result = s.look(ctx, now); result != "" {
			return result
		}
	}
	switch {
	case now.drained:
		return drained
	case !s.leads.to(now.uid):
		return unselected
	case !s.opts.Controlled():
		return uncontrolled
	default:
		return s.await(ctx, p, now, begin)
	}
}

// look asks the API about a Pod of which the watch does not know that it is being deleted: the kubelet may have learned it
// sooner, or only restarts a container. outcome is empty for one that is being deleted.
func (s *Server) look(ctx context.Context, old state) (now state, result outcome) {
	if !s.looks.TryAccept() {
		return old, busy
	}
	ctx, cancel := context.WithTimeout(ctx, min(lookTimeout, s.bound(old)))
	defer cancel()
	p, err := s.opts.Client.CoreV1().Pods(old.name.Namespace).Get(ctx, old.name.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || err == nil && p.UID != old.uid:
		return old, unknown
	case err != nil:
		s.opts.Log.Warn("cannot ask whether a Pod is being deleted; not waiting for nodes", "pod", old.name, "err", err)
		return old, failed
	case p.DeletionTimestamp == nil:
		return old, restarted
	}
	return stateOf(p), ""
}

// bound is how long after a request it is answered at the latest.
func (s *Server) bound(of state) time.Duration { return min(s.opts.Wait, of.grace/2) }

// await returns when no node sends a Pod new connections, or when the bound is over, which counts from begin. After the nodes' answer
// requests of connections made before have the time that a Pod of fairlead's own runner has.
func (s *Server) await(ctx context.Context, p *pod, now state, begin time.Time) outcome {
	bound := s.bound(now)
	timer := time.NewTimer(max(bound-time.Since(begin), 0))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return canceled
	case <-timer.C:
		s.report(now, bound)
		return late
	case <-p.done:
	}
	seen := time.Now()
	timer.Reset(min(drain.Settle(begin, seen), max(bound-seen.Sub(begin), 0)))
	select {
	case <-ctx.Done():
		return canceled
	case <-timer.C:
		return drained
	}
}

// report reports that a Pod ends although nodes may still send it new connections.
func (s *Server) report(of state, waited time.Duration) {
	s.opts.Log.Warn("a Pod ends although not all nodes have reported that they send it no new connections", "pod", of.name, "waited", waited)
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: of.name.Namespace, Name: of.name.Name, UID: of.uid}
	s.events.Event(ref, corev1.EventTypeWarning, drain.ReasonNotDrained, "ended after "+waited.String()+
		", although not all nodes have reported that they send it no new connections")
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 { // the server would wait for the body, without a bound
		_ = http.NewResponseController(w).SetReadDeadline(time.Now())
		http.Error(w, "a request of a kubelet has no body", http.StatusBadRequest)
		return
	}
	begin := time.Now()
	s.metrics.waiting.Inc()
	defer s.metrics.waiting.Dec()
	called, _ := r.Context().Value(calledKey{}).(netip.Addr)
	result := s.answer(r.Context(), called, begin)
	s.metrics.answered(result, time.Since(begin))
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(result.status())
	_, _ = w.Write([]byte(result + "\n"))
}
