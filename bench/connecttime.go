package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// connectSizes are the numbers of Services that connect-time is measured at.
// kube-proxy takes part up to kubeProxyMost: its load of 50,000 takes minutes.
var connectSizes = []int{1, 1000, 50000}

const kubeProxyMost = 1000

// The load of one round. Few clients: beside more of them the endpoint's own
// work would be most of what is measured.
const (
	openClients = 2
	keptClients = 8
)

// connectWay is how a client's connections reach the endpoint: direct, or by
// what a proxy on the client's host does.
type connectWay struct {
	name string
	load load
	proc *process // nil for direct
	// inside is set where clients are in the control group of connect-time.
	inside bool

	// to is the Service, or the endpoint, of UDP.
	to netip.AddrPort

	// One value for each round. A question is a new socket of UDP with its answer: one that is connected, and one that is not.
	questions, free            []float64 // a second
	opens, openHalf, openP     []float64 // a second; p50 and p99 in microseconds
	stream, requests, requestP []float64 // Gbit/s; a second; p99 in milliseconds
	changes                    []float64 // milliseconds
	changeCPU                  float64   // milliseconds of processor time for each
}

// connectRig is all ways at one number of Services.
type connectRig struct {
	*world
	group *controlGroup
	// direct is from a host without any rules; tracked is from the host of on, whose connection tracking sees it as well.
	direct, tracked, off, on *connectWay
	peer                     *connectWay // nil without kube-proxy
}

func (r *connectRig) ways() []*connectWay {
	out := []*connectWay{r.direct, r.tracked, r.off, r.on}
	if r.peer != nil {
		out = append(out, r.peer)
	}
	return out
}

func (b *bench) runConnectTime(ctx context.Context) ([]figure, error) {
	var out []figure
	sizes := connectSizes
	if b.small {
		sizes = []int{60}
	}
	for _, n := range sizes {
		got, err := b.connectTimeAt(ctx, n)
		if err != nil {
			return nil, fmt.Errorf("at %d Services: %w", n, err)
		}
		out = append(out, got...)
	}
	return out, nil
}

// connectTimeAt measures all ways in turns, beside one API server.
func (b *bench) connectTimeAt(ctx context.Context, services int) (figures []figure, err error) {
	endpoint := netip.AddrPortFrom(endpointAddr(0), loadPort)
	backends, err := hostNamed("backends")
	if err != nil {
		return nil, err
	}
	server, err := serveLoad(backends, loadPort)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	echo, err := serveDatagrams(backends, endpoint)
	if err != nil {
		return nil, err
	}
	defer echo.Close()
	group, err := newControlGroup()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, group.remove()) }()
	size := planeSize{services: services, endpoints: 1, changes: b.few(100, 5), limit: b.limit()}
	err = b.inWorld(ctx, size, func(w *world) (err error) {
		r := &connectRig{world: w, group: group, direct: &connectWay{name: "direct", load: load{w.plain, endpoint}, to: endpoint}}
		figures, err = b.connectTimeIn(ctx, r, endpoint)
		return err
	})
	return figures, err
}

// connectTimeIn starts the proxies, and measures.
func (b *bench) connectTimeIn(ctx context.Context, r *connectRig, endpoint netip.AddrPort) (figures []figure, err error) {
	vip, err := makeLoadService(ctx, r.api, endpoint)
	if err != nil {
		return nil, err
	}
	datagrams, err := makeDatagramService(ctx, r.api, endpoint)
	if err != nil {
		return nil, err
	}
	starts := []struct {
		way  **connectWay
		with proxy
		name string
	}{
		{&r.off, b.fairleadProxy(), "off"},
		{&r.on, b.fairleadProxy("--connect-time", "on", "--connect-time-cgroup", r.group.dir), "on"},
		{&r.peer, b.kubeProxy(), "kube-proxy nftables"},
	}
	if b.peer("kube-proxy") == "" || r.size.services > kubeProxyMost {
		starts = starts[:2]
	}
	for _, s := range starts {
		w, stop, err := b.connectThrough(ctx, r.world, s.with, vip)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		defer func() { err = errors.Join(err, stop()) }()
		w.name, w.inside, w.to = s.name, s.way == &r.on, datagrams
		if err := w.waitDatagrams(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		*s.way = w
	}
	r.tracked = &connectWay{name: "direct, tracked", load: load{r.on.load.from, endpoint}, to: endpoint}
	if err := r.rounds(ctx, b.few(9, 1), time.Duration(b.few(700, 200))*time.Millisecond); err != nil {
		return nil, err
	}
	if r.peer != nil { // it would work for each change, too
		if err := r.peer.proc.stop(); err != nil {
			return nil, err
		}
	}
	if err := r.measureWayChanges(ctx); err != nil {
		return nil, err
	}
	for _, w := range r.ways() {
		b.say("%d Services, %s: %.0f connections/s (p50 %.1f µs, p99 %.1f µs), %.0f and %.0f questions/s by UDP, connected and not, "+
			"%.1f Gbit/s, %.0f requests/s (p99 %.2f ms)", r.size.services, w.name, median(w.opens), median(w.openHalf), median(w.openP),
			median(w.questions), median(w.free), median(w.stream), median(w.requests), median(w.requestP))
	}
	return r.figures(), nil
}

// connectThrough starts a proxy on its own host and waits until all Services answer.
func (b *bench) connectThrough(ctx context.Context, w *world, p proxy, vip netip.AddrPort) (
	way *connectWay, stop func() error, err error,
) {
	h, err := b.net.host(ctx, fmt.Sprintf("node%d", b.net.count))
	if err != nil {
		return nil, nil, err
	}
	way = &connectWay{load: load{h, vip}}
	stop = func() error { return h.end(ctx, way.proc) }
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	if err := errors.Join(manyPorts(h), makeNode(ctx, w.client, h)); err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp(b.dir, p.name+"-")
	if err != nil {
		return nil, nil, err
	}
	if way.proc, err = p.start(h, dir, w.kubeconfig); err != nil {
		return nil, nil, err
	}
	var r planeResult
	if err := w.measureLoad(ctx, h, way.proc, &r); err != nil {
		return nil, nil, errors.Join(err, way.proc.alive())
	}
	err = waitFor(ctx, time.Minute, 50*time.Millisecond, way.proc, func() error {
		_, err := way.load.requests(ctx, 1, time.Millisecond)
		return err
	})
	return way, stop, err
}

// waitDatagrams waits until the Service of UDP answers.
func (w *connectWay) waitDatagrams(ctx context.Context) error {
	return waitFor(ctx, time.Minute, 50*time.Millisecond, w.proc, func() error {
		return w.load.from.on(func() error {
			to := &unix.SockaddrInet4{Port: int(w.to.Port()), Addr: w.to.Addr().As4()}
			return load{w.load.from, w.to}.question(to, make([]byte, messageSize), true)
		})
	})
}

// rounds measures each way n times, d for each kind of load, in another order
// each time: the machine is not the same all the time.
func (r *connectRig) rounds(ctx context.Context, n int, d time.Duration) error {
	ways := r.ways()
	for _, w := range ways {
		if w.proc == nil {
			continue
		}
		if err := w.proc.settle(time.Minute); err != nil {
			return err
		}
	}
	for round := range n {
		for i := range ways {
			w := ways[(i+round)%len(ways)]
			if err := r.in(w, func() error { return w.round(ctx, d) }); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}
	}
	return nil
}

// in calls f with this process, whose threads are the clients, where the clients of w are.
func (r *connectRig) in(w *connectWay, f func() error) error {
	if !w.inside {
		return f()
	}
	return r.group.in(f)
}

func (w *connectWay) round(ctx context.Context, d time.Duration) error {
	opened, err := w.load.opens(ctx, openClients, d)
	if err != nil {
		return err
	}
	w.opens = append(w.opens, opened.perSecond)
	w.openHalf = append(w.openHalf, 1e3*percentile(opened.latency, 0.5))
	w.openP = append(w.openP, 1e3*percentile(opened.latency, 0.99))
	for _, q := range []struct {
		connected bool
		into      *[]float64
	}{{true, &w.questions}, {false, &w.free}} {
		asked, err := load{w.load.from, w.to}.datagrams(ctx, openClients, d, q.connected)
		if err != nil {
			return err
		}
		*q.into = append(*q.into, asked.perSecond)
	}
	bits, err := w.load.stream(ctx, streamConns, d)
	if err != nil {
		return err
	}
	w.stream = append(w.stream, bits/1e9)
	kept, err := w.load.requests(ctx, keptClients, d)
	if err != nil {
		return err
	}
	w.requests = append(w.requests, kept.perSecond)
	w.requestP = append(w.requestP, percentile(kept.latency, 0.99))
	return nil
}

// measureWayChanges changes endpoints, and looks for each change on the host of
// off and on in turn. Both proxies work for every change.
func (r *connectRig) measureWayChanges(ctx context.Context) error {
	both := []*connectWay{r.off, r.on}
	var before [2]time.Duration
	for i, w := range both {
		if err := w.proc.settle(time.Minute); err != nil {
			return err
		}
		var err error
		if before[i], err = w.proc.cpu(); err != nil {
			return err
		}
	}
	n := 2 * r.size.changes
	for i := range n {
		w := both[i%2]
		err := r.in(w, func() error {
			took, err := r.change(ctx, w.load.from, r.movable[i%len(r.movable)])
			w.changes = append(w.changes, milliseconds.in(took))
			return err
		})
		if err != nil {
			return fmt.Errorf("change %d, %s: %w", i, w.name, err)
		}
	}
	for i, w := range both {
		after, err := w.proc.cpu()
		if err != nil {
			return err
		}
		w.changeCPU = milliseconds.in(after-before[i]) / float64(n)
	}
	return nil
}

// figures compare connect-time with all other ways.
func (r *connectRig) figures() []figure {
	at := fmt.Sprintf(" at %d Services", r.size.services)
	var out []figure
	add := func(what string, u unit, mine, other float64, peer *connectWay, want expectation) {
		f := unpaired(what+at, u, mine, want)
		f.peer, f.peerName = other, peer.name
		out = append(out, f)
	}
	for _, w := range r.ways() {
		if w == r.on {
			continue
		}
		least, same := expectation{least: 1}, expectation{least: 0.95} // of kept connections: within noise
		switch w {
		case r.direct: // connection tracking has its price with every proxy
			least, same = expectation{}, expectation{}
		case r.tracked:
			least.least = 0.97
		}
		add("new connections", perSecond, median(r.on.opens), median(w.opens), w, least)
		add("questions from new connected sockets of UDP", perSecond, median(r.on.questions), median(w.questions), w, least)
		add("questions from new unconnected sockets of UDP", perSecond, median(r.on.free), median(w.free), w, least)
		add("a connection, p50", microseconds, median(r.on.openHalf), median(w.openHalf), w, expectation{})
		add("a connection, p99", microseconds, median(r.on.openP), median(w.openP), w, expectation{})
		add(fmt.Sprintf("throughput of %d kept connections", streamConns), gigabits, median(r.on.stream), median(w.stream), w, same)
		add(fmt.Sprintf("requests on %d kept connections", keptClients), perSecond, median(r.on.requests), median(w.requests), w, same)
		add("a request, p99", milliseconds, median(r.on.requestP), median(w.requestP), w, expectation{})
	}
	add("endpoint change to packet, p50", milliseconds, median(r.on.changes), median(r.off.changes), r.off, expectation{share: 1.1})
	add("CPU for one change", milliseconds, r.on.changeCPU, r.off.changeCPU, r.off, expectation{share: 1.1})
	return out
}
