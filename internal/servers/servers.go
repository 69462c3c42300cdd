// Package servers has the clients of a node use whichever of several API servers
// answers. A Balancer sends each request to the first server of the node's own order
// that is up, leaves a server that refuses connections or falls silent, and returns to
// one that is back.
//
// The names and addresses come from the operator (--server) and from the EndpointSlices of
// default/kubernetes, which are kept in a file for the next start.
// Every server has a certificate for its own address, so each request is sent, and
// verified, under the address of its server.
package servers

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Times of a Balancer.
const (
	// pingPeriod is how long a connection is idle until the server is asked for a sign of
	// life, by a PING of HTTP/2. A server of which nothing is heard for silence is left, if
	// another one answers.
	pingPeriod = time.Second
	silence    = 1500 * time.Millisecond
	checkEvery = 200 * time.Millisecond
	// probeTimeout bounds the connection and handshake by which a server shows that it is up.
	probeTimeout = time.Second
	// dialTimeout is that of a request while there are other servers, aloneTimeout
	// client-go's, while there are none.
	dialTimeout, aloneTimeout = time.Second, 30 * time.Second
	// Servers that are down are probed this often, at first and later.
	minProbe, maxProbe = 100 * time.Millisecond, time.Second
	// maxReturn is the longest time until a server that is back is used by a node that
	// prefers it: each node waits for a random part, so that they do not come all at once.
	maxReturn = 30 * time.Second
	// failFast is how long, without any server, all requests fail at once, so that callers
	// know. After it watches wait for a server instead of trying again and again.
	failFast = 2 * time.Second
)

const (
	// maxServers bounds how many addresses are learned, and how many are remembered that are no longer in the list.
	maxServers = 16
	// keepLeft is how long an address is remembered that is no longer in the list, at least: until the next change of the list after
	// that, or the next start.
	keepLeft = 24 * time.Hour
)

// Options configure a Balancer. Node, Config and Log are required.
type Options struct {
	// Node is the name of this node: its order of the servers follows from it.
	Node string
	// Config is the configuration whose Host is the first server, and by whose authority
	// servers are verified.
	Config *rest.Config
	// More are URLs of further servers.
	More []string
	// File keeps the addresses that were learned; empty for none.
	File string
	Log  *slog.Logger
}

// Balancer chooses the server of each request.
type Balancer struct {
	log  *slog.Logger
	node string
	file string
	tls  *tls.Config // of probes; nil without TLS

	mu  sync.Mutex
	all map[string]*server // by host:port
	// outage is since when no server answers, zero while one does; last is why.
	outage time.Time
	last   error
	// changed is closed, and replaced, when the state of a server changes.
	changed chan struct{}
}

// server is one server; the Balancer's mu guards it.
type server struct {
	at             string // host:port
	given, learned bool
	// left is when a list came without a server that was in the one before; else it is zero. Such a server is the last choice: one that
	// was silent for some seconds leaves the list, and may be the only one that is up when the others have failed and no server is left
	// to report it.
	left  time.Time
	state state
	// usable is when a server that is up is taken before others.
	usable time.Time
	// next is when to probe it while it is not up, pause the time between two probes.
	next  time.Time
	pause time.Duration
	// asked is set while it is probed.
	asked bool
	conns map[*conn]struct{}
}

type state int

const (
	unknown state = iota
	up
	down
)

// New returns a Balancer. It has no effect before Use and Run.
func New(o Options) (*Balancer, error) {
	b := &Balancer{
		log: o.Log, node: o.Node, file: o.File, all: map[string]*server{}, changed: make(chan struct{}),
	}
	first, _, err := rest.DefaultServerUrlFor(o.Config)
	if err != nil {
		return nil, err
	}
	b.add(address(first)).given = true
	for _, text := range o.More {
		u, err := url.Parse(text)
		if err != nil || u.Scheme != first.Scheme || u.Host == "" {
			return nil, fmt.Errorf("%q is not the address of a server: want %s://HOST:PORT", text, first.Scheme)
		}
		b.add(address(u)).given = true
	}
	if first.Scheme == "https" {
		if b.tls, err = rest.TLSConfigFor(o.Config); err != nil {
			return nil, err
		}
		if b.tls == nil {
			b.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		b.tls = b.tls.Clone()
		b.tls.GetClientCertificate, b.tls.Certificates = nil, nil
	}
	for _, at := range b.read() {
		b.add(at).learned = true
	}
	pingIdleConnections()
	return b, nil
}

// pingIdleConnections has the clients of this process that are made later send a PING
// when nothing was heard for pingPeriod. client-go has only this variable for it
// (k8s.io/apimachinery/pkg/util/net); a value that is set stays.
func pingIdleConnections() {
	const variable = "HTTP2_READ_IDLE_TIMEOUT_SECONDS"
	if os.Getenv(variable) == "" {
		_ = os.Setenv(variable, fmt.Sprint(int(pingPeriod/time.Second)))
	}
}

func address(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80"}[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), cmp.Or(port, "443"))
}

// add returns the server at an address, which it makes if there is none.
func (b *Balancer) add(at string) *server {
	s := b.all[at]
	if s == nil {
		s = &server{at: at, conns: map[*conn]struct{}{}, pause: minProbe}
		b.all[at] = s
	}
	return s
}

// read returns the addresses of the file.
func (b *Balancer) read() (list []string) {
	if b.file == "" {
		return nil
	}
	text, err := os.ReadFile(b.file)
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.log.Warn("cannot read the recorded servers; using --server until the others are learned again", "file", b.file, "err", err)
		return nil
	}
	return list
}

// learn takes the addresses of all servers, as default/kubernetes has them. None at all
// teaches nothing: this node has reached a server that cannot be reached by others.
func (b *Balancer) learn(list []string) {
	slices.Sort(list)
	list = slices.Compact(list)
	list = list[:min(len(list), maxServers)]
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(list) == 0 || slices.Equal(list, b.learned()) {
		return
	}
	for _, at := range list {
		if b.all[at] == nil && b.best(nil) != nil {
			b.add(at).state = down // until it is probed: nothing waits for it
		}
		b.add(at).learned = true
	}
	now := time.Now()
	for at, s := range b.all {
		was := s.learned
		s.learned = slices.Contains(list, at)
		switch {
		case s.learned:
			if !s.left.IsZero() && s.state == up { // it is back, and all nodes that prefer it hear so at once
				s.usable = now.Add(rand.N(maxReturn))
			}
			s.left = time.Time{}
		case was:
			s.left = now
		}
	}
	b.forget(now)
	b.signal()
	b.log.Info("servers", "addresses", list)
	if b.file == "" {
		return
	}
	text, err := json.Marshal(list)
	if err == nil {
		err = fileio.Replace(b.file, text, 0o600)
	}
	if err != nil {
		b.log.Warn("cannot record the servers; the next start begins with --server", "file", b.file, "err", err)
	}
}

// forget removes the servers that have left the list long ago, and the ones that left first if there are many. It is called with
// mu held.
func (b *Balancer) forget(now time.Time) {
	left := b.order(func(s *server) bool { return !s.learned && !s.given && len(s.conns) == 0 })
	slices.SortStableFunc(left, func(a, c *server) int { return c.left.Compare(a.left) })
	for i, s := range left {
		if i >= maxServers || now.Sub(s.left) > keepLeft {
			delete(b.all, s.at)
		}
	}
}

// learned returns the learned addresses, sorted. It is called with mu held.
func (b *Balancer) learned() (out []string) {
	for at, s := range b.all {
		if s.learned {
			out = append(out, at)
		}
	}
	slices.Sort(out)
	return out
}

// signal wakes who waits for a server. It is called with mu held.
func (b *Balancer) signal() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// rank returns the place of a server in this node's order (rendezvous hashing): nodes
// spread evenly over the servers, and only the nodes of a server that leaves move. Servers
// that are only given come after learned ones: a given address may be the address of all.
// The last ones are servers that are no longer in the list.
func (b *Balancer) rank(s *server) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(b.node + "\x00" + s.at))
	score := mix(h.Sum64()) >> 2
	switch {
	case s.learned:
		score |= 1 << 63
	case s.given:
		score |= 1 << 62
	}
	return score
}

// mix spreads the bits of FNV-1a, whose high bits hardly follow the last byte (the
// finalizer of MurmurHash3).
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// order returns the servers for which accept is true, best first. The caller holds mu.
func (b *Balancer) order(accept func(*server) bool) (out []*server) {
	for _, s := range b.all {
		if accept(s) {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, c *server) int { return cmp.Compare(b.rank(c), b.rank(a)) })
	return out
}

// unreachableError is the error of a request while no server answers. It is
// ECONNREFUSED too, on which a reflector of client-go continues its watch later where it
// ended, and does not list everything again.
type unreachableError struct{ last error }

func (e unreachableError) Error() string {
	if e.last == nil {
		return "no server answers"
	}
	return "no server answers: " + e.last.Error()
}

func (e unreachableError) Unwrap() []error { return []error{syscall.ECONNREFUSED, e.last} }

// pick returns the server for a request, not one of tried. While no server answers it
// is an error, or, if wait is set and failFast is over, pick waits for one.
func (b *Balancer) pick(ctx context.Context, tried map[*server]bool, wait bool) (*server, error) {
	for {
		b.mu.Lock()
		s, changed, asking := b.best(tried), b.changed, b.asking(tried)
		waits := asking || wait && !b.outage.IsZero() && time.Since(b.outage) >= failFast
		last := b.last
		b.mu.Unlock()
		switch {
		case s != nil:
			return s, nil
		case !waits:
			return nil, unreachableError{last}
		}
		select {
		case <-changed:
			clear(tried)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// best returns the server to use now, nil if there is none or it is being asked for the
// first time. It is called with mu held.
func (b *Balancer) best(tried map[*server]bool) *server {
	now := time.Now()
	first := func(accept func(*server) bool) *server {
		if list := b.order(func(s *server) bool { return accept(s) && !tried[s] }); len(list) > 0 {
			return list[0]
		}
		return nil
	}
	if s := first(func(s *server) bool { return s.state == unknown || s.state == up && !now.Before(s.usable) }); s != nil {
		if s.state == unknown && s.asked {
			return nil
		}
		return s
	}
	return first(func(s *server) bool { return s.state == up })
}

// answers records that a server has been reached.
func (b *Balancer) answers(s *server) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.state == up {
		return
	}
	s.usable = time.Time{}
	if s.state == down {
		if len(b.order(func(o *server) bool { return o.state == up })) > 0 {
			s.usable = time.Now().Add(rand.N(maxReturn))
		}
		b.log.Info("a server answers", "server", s.at)
	}
	s.state, s.pause = up, minProbe
	b.outage, b.last = time.Time{}, nil
	b.signal()
}

// leave records that a server does not answer, and ends its connections.
func (b *Balancer) leave(s *server, why error) {
	var ended []*conn
	defer func() { // after the lock, which Close takes
		for _, c := range ended {
			_ = c.Close()
		}
	}()
	b.mu.Lock()
	defer b.mu.Unlock()
	before := s.state
	s.state, s.next = down, time.Now().Add(jitter(s.pause))
	s.pause = min(2*s.pause, maxProbe)
	ended = slices.Collect(maps.Keys(s.conns))
	if before != down {
		b.log.Warn("a server does not answer", "server", s.at, "err", why)
		b.signal()
	}
	if b.best(nil) == nil && b.outage.IsZero() && !b.asking(nil) {
		b.outage, b.last = time.Now(), why
		b.log.Warn("no server answers; this node keeps its Pods and its last known state; retrying", "err", why)
	}
}

// asking reports whether the first answer of a server that is not one of tried is awaited.
// It is called with mu held.
func (b *Balancer) asking(tried map[*server]bool) bool {
	for _, s := range b.all {
		if s.state == unknown && s.asked && !tried[s] {
			return true
		}
	}
	return false
}

// jitter returns a time between d and 3/2 of it.
func jitter(d time.Duration) time.Duration { return d + rand.N(d/2+1) }
