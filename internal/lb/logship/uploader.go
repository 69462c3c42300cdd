package logship

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Destination is where the files of a Service go.
type Destination struct {
	Bucket, Prefix string
	Credentials    Credentials
}

// Options are the options of an Uploader.
type Options struct {
	Log *slog.Logger
	// Dir is the directory of access logs, and Node names this machine in it.
	Dir, Node string
	Endpoint  Endpoint
	// Keep is true if files stay in Dir when they are stored.
	Keep bool
	// Finish makes sure that nothing more is written to files that are complete at a time.
	Finish func(time.Time)
	// Report is called with why files of a Service cannot be stored, "" when they can again.
	Report func(of svc.Name, problem string)
	// Period is how often files are looked for (default 15 s), and Retry how long a Service waits after a first failure
	// (default 5 s; up to five minutes after others).
	Period, Retry time.Duration
}

// Uploader stores files when they are complete.
type Uploader struct {
	o         Options
	endpoint  Endpoint
	transport *http.Transport
	room      chan struct{} // has one for each upload
	wake      loop.Signal

	mu       sync.Mutex
	services map[Owner]*service

	uploaded, failed atomic.Uint64
}

// service is a Service whose files are stored.
type service struct {
	to   Destination
	gone time.Time // since when it is not asked for any more, zero while it is

	busy    bool
	stop    context.CancelFunc // of the upload that runs last
	pause   time.Duration      // after the last failure
	after   time.Time          // which the next upload begins
	problem string
}

const (
	defaultPeriod = 15 * time.Second
	defaultRetry  = 5 * time.Second
	maxRetry      = 5 * time.Minute
	// goneFor is how long files of a Service that has gone are stored: its last interval has ended by then.
	goneFor = 2 * time.Hour
)

// New returns an Uploader that does nothing before Run.
func New(o Options) *Uploader {
	o.Dir = filepath.Clean(o.Dir)
	o.Period, o.Retry = cmp.Or(o.Period, defaultPeriod), cmp.Or(o.Retry, defaultRetry)
	return &Uploader{
		o: o, endpoint: o.Endpoint, transport: o.Endpoint.transport(), room: make(chan struct{}, maxPerEndpoint),
		wake: loop.NewSignal(), services: map[Owner]*service{},
	}
}

// Uploaded returns how many files were stored, and Failed how many uploads have failed.
func (u *Uploader) Uploaded() uint64 { return u.uploaded.Load() }

// Failed returns how many uploads have failed.
func (u *Uploader) Failed() uint64 { return u.failed.Load() }

// Set records where the files of all Services go. The remaining files of a Service that is no longer named go to its last
// destination, for a while. A Service with the zero Destination has no credentials: earlier ones are no longer used. Set
// may be called again with the same value.
func (u *Uploader) Set(all map[Owner]Destination) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for n, s := range u.services {
		if _, has := all[n]; !has && s.gone.IsZero() {
			s.gone = time.Now()
		}
	}
	for n, to := range all {
		s := u.services[n]
		if to == (Destination{}) {
			if s != nil {
				s.stop()
				delete(u.services, n)
			}
			continue
		}
		if s == nil {
			s = &service{stop: func() {}}
			u.services[n] = s
		}
		if s.to != to {
			s.to, s.after, s.pause = to, time.Time{}, 0
			u.wake.Set()
		}
		s.gone = time.Time{}
	}
}

// Run stores files until ctx ends, and returns when no upload runs any more.
func (u *Uploader) Run(ctx context.Context) {
	defer u.transport.CloseIdleConnections()
	var running sync.WaitGroup
	defer running.Wait()
	tick := time.NewTicker(u.o.Period)
	defer tick.Stop()
	for {
		u.scan(ctx, &running, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-u.wake:
		}
	}
}

// scan begins uploads of what is complete.
func (u *Uploader) scan(ctx context.Context, running *sync.WaitGroup, now time.Time) {
	u.o.Finish(now)
	u.mu.Lock()
	defer u.mu.Unlock()
	for n, s := range maps.All(u.services) {
		if s.busy || now.Before(s.after) {
			continue
		}
		if !s.gone.IsZero() && now.Sub(s.gone) > goneFor {
			delete(u.services, n)
			continue
		}
		s.busy = true
		to := s.to
		var uploading context.Context
		uploading, s.stop = context.WithCancel(ctx)
		stop := s.stop
		running.Go(func() {
			defer stop()
			err := u.upload(uploading, n, to, now)
			u.finish(ctx, n, s, to, err)
		})
	}
}

// upload stores the complete files of a Service, one after the other.
func (u *Uploader) upload(ctx context.Context, n Owner, to Destination, now time.Time) error {
	select {
	case u.room <- struct{}{}:
		defer func() { <-u.room }()
	case <-ctx.Done():
		return ctx.Err()
	}
	files, err := complete(u.o.Dir, u.o.Node, n, now)
	if err != nil || len(files) == 0 {
		return err
	}
	client, err := u.endpoint.client(u.transport, to.Credentials)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := u.store(ctx, client, to, f); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(f.path), err)
		}
		u.uploaded.Add(1)
		if err := f.done(u.o.Dir, u.o.Keep); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

// maxError bounds what a line of the log has of an error, which a server may have written.
const maxError = 500

// finish takes note of how the uploads of a Service went.
func (u *Uploader) finish(ctx context.Context, n Owner, s *service, to Destination, err error) {
	if ctx.Err() != nil {
		return
	}
	if problem, changed := u.record(n, s, to, err); changed {
		u.o.Report(n.Service, problem)
	}
}

// record returns why uploads of a Service fail, and whether that has changed.
func (u *Uploader) record(n Owner, s *service, to Destination, err error) (problem string, changed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	s.busy = false
	if s.to != to || u.services[n] != s { // another result counts
		return "", false
	}
	if err == nil {
		s.pause, s.after = 0, time.Time{}
	} else {
		u.failed.Add(1)
		problem = fmt.Sprintf("cannot store access logs in bucket %s: %s; retrying", to.Bucket, reason(err))
		s.pause = min(max(2*s.pause, u.o.Retry), maxRetry)
		s.after = time.Now().Add(s.pause/2 + rand.N(s.pause/2+1))
		if problem != s.problem {
			text := err.Error()
			u.o.Log.Warn("cannot store access logs; retrying", "service", n.Service, "bucket", to.Bucket, "err", text[:min(len(text), maxError)])
		}
	}
	changed = s.problem != problem && s.gone.IsZero()
	s.problem = problem
	return problem, changed
}
