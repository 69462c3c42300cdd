package chain

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Server answers questions as a Corefile asks for. Make it with New, run it with Run.
type Server struct {
	o       Options
	metrics *metrics
	web     *web
	first   *instance
	current atomic.Pointer[instance]
	ending  atomic.Bool

	mu        sync.Mutex
	listeners map[endpoint]*listener
}

// New returns a Server. It reads certificates and zone files, but opens no sockets and sends
// no requests yet.
func New(o Options) (*Server, error) {
	s := &Server{o: o, metrics: newMetrics(o.Version), listeners: map[endpoint]*listener{}}
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
	if err := s.use(serve, s.first, nil); err != nil {
		return err
	}
	for _, note := range s.o.Plan.Notes {
		s.o.Log.Warn("a setting of the Corefile has no effect", "setting", note)
	}
	looped := make(chan error, 1)
	var beside sync.WaitGroup
	for _, l := range s.first.loops {
		beside.Go(func() {
			if err := l.find(serve); err != nil {
				select {
				case looped <- err:
				default:
				}
			}
		})
	}
	beside.Go(func() { s.reload(serve) })
	var err error
	select {
	case <-ctx.Done():
		s.lameduck()
	case err = <-looped:
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

// use has an instance serve in place of old. If it cannot, old serves on.
func (s *Server) use(ctx context.Context, in, old *instance) error {
	var opened []*listener
	for at, r := range in.listen {
		s.mu.Lock()
		known := s.listeners[at]
		s.mu.Unlock()
		if known != nil {
			continue
		}
		l, err := open(at, r)
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
	in.start(ctx, context.WithoutCancel(ctx), old)
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
	return nil
}

func (s *Server) closeListeners() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, l := range s.listeners {
		l.close()
		delete(s.listeners, at)
	}
}

// reload reads the Corefile again when it changes, until ctx ends.
func (s *Server) reload(ctx context.Context) {
	refused := "" // the last error, which is logged once
	for s.o.File != "" {
		r := s.current.Load().plan.Reload()
		if r == nil {
			return
		}
		every := r.Interval
		if r.Jitter > 0 {
			every += rand.N(r.Jitter) - r.Jitter/2
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		if !s.current.Load().plan.Changed() {
			continue
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
	if err := s.use(ctx, in, old); err != nil {
		return err
	}
	old.end(in)
	s.o.Log.Info("the changed Corefile is in use", "file", s.o.File)
	return nil
}
