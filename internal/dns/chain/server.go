package chain

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// Server answers questions as a Corefile asks for. Make it with New, run it with Run.
type Server struct {
	o       Options
	metrics *metrics
	web     *web
	first   *instance
	current atomic.Pointer[instance]
	ending  atomic.Bool
	looped  chan error // the first loop that is found
	syncFor time.Duration

	mu        sync.Mutex
	listeners map[endpoint]*listener
}

// New returns a Server. It reads certificates and zone files, but opens no sockets and sends
// no requests yet.
func New(o Options) (*Server, error) {
	s := &Server{
		o: o, metrics: newMetrics(o.Version), listeners: map[endpoint]*listener{}, looped: make(chan error, 1), syncFor: syncTimeout,
	}
	s.web = newWeb(s)
	var err error
	s.first, err = build(o, s.metrics, o.Plan, nil)
	return s, err
}

// Ready reports whether the server listens and the names of its clusters are complete.
func (s *Server) Ready() bool {
	in := s.current.Load()
	return in != nil && in.unready() == "" && !s.ending.Load()
}

// Run serves until ctx ends, and then for the time of the plugin health's lameduck. It
// returns when everything it has started has ended. Its error is a socket that cannot be
// opened, or a forwarding loop.
func (s *Server) Run(ctx context.Context) error {
	serve, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer s.web.close()
	defer s.closeListeners()
	if err := s.use(ctx, serve, s.first, nil); err != nil {
		return err
	}
	for _, note := range s.o.Plan.Notes {
		s.o.Log.Warn("a setting of the Corefile has no effect", "setting", note)
	}
	var beside sync.WaitGroup
	beside.Go(func() { s.reload(serve) })
	var err error
	select {
	case <-ctx.Done():
		s.lameduck()
	case err = <-s.looped:
	}
	s.ending.Store(true)
	stop()
	beside.Wait()
	s.current.Load().end(nil)
	return err
}

// lameduck answers on, not ready, until clients have turned to other servers.
func (s *Server) lameduck() {
	s.ending.Store(true)
	if d := s.current.Load().lameduck(); d > 0 {
		s.o.Log.Info("dns is stopping; it still answers until clients have turned to other servers", "for", d)
		time.Sleep(d)
	}
}

// syncTimeout is how long an instance waits for the names of its clusters before it serves
// (CoreDNS's default of startup_timeout).
const syncTimeout = 5 * time.Second

// use has an instance serve in place of old until serve ends. If it cannot, old serves on.
// The end of ctx ends the wait for the clusters.
func (s *Server) use(ctx, serve context.Context, in, old *instance) error {
	in.startClusters(context.WithoutCancel(serve), old)
	err := s.awaitClusters(ctx, in, old)
	if err == nil {
		err = s.replace(serve, in)
	}
	if err != nil {
		in.closeClusters(old)
	}
	return err
}

// awaitClusters waits until the names of the clusters are complete. Only at the start, when no
// other instance has them, the server serves without.
func (s *Server) awaitClusters(ctx context.Context, in, old *instance) error {
	ctx, cancel := context.WithTimeout(ctx, s.syncFor)
	defer cancel()
	tick := time.NewTicker(syncPoll)
	defer tick.Stop()
	for in.unready() != "" {
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		if old != nil {
			return fmt.Errorf("%w after %v", plugin.ErrNotReady, s.syncFor)
		}
		s.o.Log.Warn("dns begins without the names of the cluster; they are SERVFAIL until the API server has listed them")
		return nil
	}
	return nil
}

// syncPoll is how often a starting instance looks whether the names are complete.
const syncPoll = 5 * time.Millisecond

// replace opens the sockets that in needs, has it serve, and closes the ones that it does not need.
func (s *Server) replace(ctx context.Context, in *instance) error {
	var opened []*listener
	for at, r := range in.listen {
		s.mu.Lock()
		known := s.listeners[at]
		s.mu.Unlock()
		if known != nil {
			continue
		}
		shared, err := s.sharePort(at, in)
		var l *listener
		if err == nil {
			l, err = open(at, r, shared)
		}
		if err != nil {
			for _, o := range opened {
				o.closeSockets()
			}
			return err
		}
		opened = append(opened, l)
	}
	if err := s.web.use(in.plan); err != nil {
		for _, o := range opened {
			o.closeSockets()
		}
		return err
	}
	ctx = in.start(ctx)
	s.current.Store(in)
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, l := range s.listeners {
		if r := in.listen[at]; r != nil {
			l.routes.Store(r)
		} else {
			l.close()
			delete(s.listeners, at)
		}
	}
	for _, l := range opened {
		s.listeners[l.at] = l
		l.serve()
		s.o.Log.Info("dns is listening", "server", serverName(l.at))
	}
	s.findLoops(ctx, in)
	return nil
}

// sharePort lets the sockets of an endpoint that in brings have a port of listeners that in
// does not need, and reports whether there are some.
func (s *Server) sharePort(at endpoint, in *instance) (shared bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for known, l := range s.listeners {
		if known.port == at.port && in.listen[known] == nil {
			shared, err = true, errors.Join(err, l.share())
		}
	}
	return shared, err
}

// findLoops has each loop of an instance looked for, until the instance ends.
func (s *Server) findLoops(ctx context.Context, in *instance) {
	for _, l := range in.loops {
		in.wg.Go(func() {
			if err := l.find(ctx); err != nil {
				select {
				case s.looped <- err:
				default:
				}
			}
		})
	}
}

func (s *Server) closeListeners() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, l := range s.listeners {
		l.close()
		delete(s.listeners, at)
	}
}

// reload reads the Corefile again when it changes, or is asked to, until ctx ends.
func (s *Server) reload(ctx context.Context) {
	refused := "" // the last error, which is logged once
	for s.o.File != "" {
		plan := s.current.Load().plan
		select {
		case <-ctx.Done():
			return
		case <-s.o.Reload:
			refused = "" // whoever asks wants to know
		case <-nextLook(plan):
			if !plan.Changed() {
				continue
			}
		}
		err := s.reloadOnce(ctx)
		if err == nil {
			refused = ""
			continue
		}
		if text := err.Error(); text != refused {
			refused = text
			s.metrics.reloadFailed.Inc()
			s.o.Log.Error("cannot use the changed Corefile; the last one stays in use", "err", err)
		}
	}
}

// nextLook returns when to look for changes; nil for never.
func nextLook(p *corefile.Plan) <-chan time.Time {
	r := p.Reload()
	if r == nil {
		return nil
	}
	every := r.Interval
	if r.Jitter > 0 {
		every += rand.N(r.Jitter) - r.Jitter/2
	}
	return time.After(every)
}

// reloadOnce has the changed Corefile served.
func (s *Server) reloadOnce(ctx context.Context) error {
	plan, err := corefile.Load(s.o.File)
	if err != nil {
		return err
	}
	old := s.current.Load()
	in, err := build(s.o, s.metrics, plan, old)
	if err != nil {
		return err
	}
	if err := s.use(ctx, ctx, in, old); err != nil {
		return err
	}
	old.end(in)
	s.o.Log.Info("the changed Corefile is in use", "file", s.o.File)
	return nil
}
