package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// spare is the number of the first endpoint that no Service has at the start;
// changes take theirs from there on.
const spare = 4_000_000

// proxy is a program that brings Services into the kernel of a host.
type proxy struct {
	name  string
	start func(h *host, dir, kubeconfig string) (*process, error)
}

// fairleadProxy is fairlead's proxy in mode nft, with further arguments.
func (b *bench) fairleadProxy(args ...string) proxy {
	return proxy{"fairlead", func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "fairlead-proxy", b.fairlead, append([]string{"proxy", "--mode", "nft",
			"--kubeconfig", kubeconfig, "--node-name", h.name, "--conntrack-max-per-core", "0"}, args...)...)
	}}
}

// kubeProxy is kube-proxy in nftables mode, with its defaults but for limits
// that belong to the whole machine.
func (b *bench) kubeProxy() proxy {
	return proxy{"kube-proxy", func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "kube-proxy", b.peer("kube-proxy"), "--proxy-mode", "nftables",
			"--kubeconfig", kubeconfig, "--hostname-override", h.name,
			"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0")
	}}
}

// planeSize is how much a proxy is given, and how often it is changed.
type planeSize struct {
	services, endpoints int
	changes, additions  int
	pause               time.Duration // before each change
	limit               time.Duration // of one load
	churn               int           // changes at churnRate
	burst               int           // changes at once
	throughput          bool
}

// planeResult is what was measured of one proxy; durations in the units of the
// table.
type planeResult struct {
	load, loadCPU float64   // seconds
	changes       []float64 // milliseconds
	changeCPU     float64   // milliseconds of processor time for each
	additions     []float64 // milliseconds
	connect       float64   // median of a connection through a ClusterIP, in that of a direct one
	// Connections one after the other, through a ClusterIP and direct ones:
	// microseconds.
	through, direct []float64
	churn           []float64 // milliseconds
	burst           float64   // milliseconds after the last write
	burstWrites     float64   // seconds that the writes took
	// Gbit/s of an established connection.
	throughput, directThroughput float64
	memory, peakSize             float64 // megabytes
}

// world is the content of an API server for a measurement of proxies.
type world struct {
	*api
	size  planeSize
	plain *host // without any proxy
	// memoryAfter is how long after its start a proxy's memory is looked at.
	memoryAfter time.Duration
	services    []service
	movable     []service // of one endpoint, which changes
	changed     uint32
	added       int
}

// makeWorld starts an API server and fills it.
func (b *bench) makeWorld(ctx context.Context, size planeSize) (*world, error) {
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	w := &world{api: a, size: size, memoryAfter: b.memoryAfter()}
	begin := time.Now()
	if w.plain, err = b.net.host(ctx, fmt.Sprintf("plain%d", b.net.count)); err != nil {
		return nil, errors.Join(err, a.stop())
	}
	if w.services, err = fill(ctx, a.client, shape{prefix: "svc", services: size.services, endpoints: size.endpoints}); err == nil {
		w.movable, err = fill(ctx, a.client, shape{prefix: "movable", services: 10, endpoints: 1, from: spare - 100})
	}
	if err != nil {
		return nil, errors.Join(err, a.stop())
	}
	b.say("%d services x %d endpoints written in %s", size.services, size.endpoints, time.Since(begin).Round(time.Millisecond))
	return w, nil
}

// measure runs one proxy on its own host and takes everything away again.
func (b *bench) measure(ctx context.Context, w *world, p proxy) (r planeResult, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("node%d", b.net.count))
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	if err := makeNode(ctx, w.client, h); err != nil {
		return r, err
	}
	dir, err := os.MkdirTemp(b.dir, p.name+"-")
	if err != nil {
		return r, err
	}
	proc, err := p.start(h, dir, w.kubeconfig)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, proc.stop()) }()
	for _, step := range []func(context.Context, *host, *process, *planeResult) error{w.measureLoad, w.measureMemory, w.measureConnections,
		w.measureThroughput, w.measureChanges, w.measureAdditions, w.measureChurn, w.measureBurst} {
		if err := step(ctx, h, proc, &r); err != nil {
			return r, errors.Join(fmt.Errorf("%s: %w", p.name, err), proc.alive())
		}
	}
	peak, err := proc.peak()
	r.peakSize = peak / 1e6
	b.say("%s: loaded in %.2f s with %.2f s of CPU; change p50 %.1f ms", p.name, r.load, r.loadCPU, percentile(r.changes, 0.5))
	return r, err
}

// loadPause is how often an answer is looked for while a load goes on.
const loadPause = 2 * time.Millisecond

// measureLoad waits until the Services answer: first some that lie far apart,
// the last one among them, and then every single one. Looking at chains that
// answer already takes time too, which does not count.
func (w *world) measureLoad(ctx context.Context, h *host, proc *process, r *planeResult) error {
	ctx, cancel := context.WithTimeout(ctx, w.size.limit)
	defer cancel()
	var last time.Time
	err := h.on(func() error {
		for pass, step := range []int{max(len(w.services)/20, 1), 1} {
			for i := len(w.services) - 1; i >= 0; i -= step {
				s := w.services[i]
				if a, err := ask(s.at); pass > 0 && err == nil && s.has(a) {
					continue
				}
				at, err := until(ctx, s.at, loadPause, s.has)
				if err != nil {
					return fmt.Errorf("service %s: %w", s.name, err)
				}
				last = at
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.load = last.Sub(proc.begin).Seconds()
	cpu, err := proc.cpu()
	if err != nil {
		return err
	}
	r.loadCPU = cpu.Seconds()
	return nil
}

func (w *world) measureMemory(ctx context.Context, _ *host, proc *process, r *planeResult) error {
	if w.size.changes == 0 {
		return nil // it is not reported
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(proc.begin.Add(w.memoryAfter))):
	}
	m, err := proc.memory()
	r.memory = m / 1e6
	return err
}

// Connections are opened in rounds, so that what else the machine does meets
// both kinds alike.
const (
	connectRounds = 41
	connectEach   = 100
)

// measureConnections opens connections, one at a time, through a ClusterIP from
// the proxy's host and directly from one without any rules.
func (w *world) measureConnections(ctx context.Context, h *host, proc *process, r *planeResult) error {
	if err := proc.settle(time.Minute); err != nil {
		return err
	}
	through := w.services[len(w.services)/2]
	direct := netip.AddrPortFrom(endpointAddr(through.first), backendPort)
	var ratios []float64
	for range connectRounds {
		var took [2][]float64
		for kind, way := range []struct {
			from *host
			to   netip.AddrPort
		}{{h, through.at}, {w.plain, direct}} {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			err := way.from.on(func() error {
				late := 0 // on a busy machine some miss tryTimeout
				for range connectEach {
					begin := time.Now()
					if _, err := ask(way.to); err != nil {
						if late++; late > connectEach/4 {
							return fmt.Errorf("%d connections to %s failed: %w", late, way.to, err)
						}
					}
					took[kind] = append(took[kind], microseconds.in(time.Since(begin)))
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		ratios = append(ratios, percentile(took[0], 0.5)/percentile(took[1], 0.5))
		r.through = append(r.through, took[0]...)
		r.direct = append(r.direct, took[1]...)
	}
	r.connect = percentile(ratios, 0.5)
	return nil
}

// changeLimit bounds one change, changePause is how often it is looked for.
const (
	changeLimit = time.Minute
	changePause = 200 * time.Microsecond
)

// measureChanges gives Services of one endpoint another one, time after time.
func (w *world) measureChanges(ctx context.Context, h *host, proc *process, r *planeResult) error {
	before, err := proc.cpu()
	if err != nil {
		return err
	}
	for i := range w.size.changes {
		d, err := w.change(ctx, h, w.movable[i%len(w.movable)])
		if err != nil {
			return fmt.Errorf("change %d: %w", i, err)
		}
		r.changes = append(r.changes, milliseconds.in(d))
	}
	after, err := proc.cpu()
	r.changeCPU = milliseconds.in(after-before) / float64(max(w.size.changes, 1))
	return err
}

// change gives s another endpoint, see moveTo.
func (w *world) change(ctx context.Context, h *host, s service) (time.Duration, error) {
	time.Sleep(w.size.pause)
	return w.moveTo(ctx, h, s, w.next(), changePause)
}

// next is an endpoint that no Service has had yet.
func (w *world) next() netip.Addr {
	w.changed++
	return endpointAddr(spare + w.changed)
}

// moveTo writes an address into the slice of s and returns how long it took,
// from before the write, until a new connection reached it, or one that was
// written later.
func (w *world) moveTo(ctx context.Context, h *host, s service, to netip.Addr, pause time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, changeLimit)
	defer cancel()
	type arrival struct {
		at  time.Time
		err error
	}
	looking, seen := make(chan struct{}), make(chan arrival, 1)
	go func() {
		var at time.Time
		err := h.on(func() (err error) {
			close(looking)
			at, err = until(ctx, s.at, pause, func(a netip.Addr) bool { return !a.Less(to) })
			return err
		})
		seen <- arrival{at, err}
	}()
	<-looking
	begin := time.Now()
	_, err := w.client.DiscoveryV1().EndpointSlices(benchNamespace).Update(ctx, endpointSlice(s.name, 0, []netip.Addr{to}),
		metav1.UpdateOptions{})
	if err != nil {
		cancel()
		<-seen
		return 0, err
	}
	a := <-seen
	return a.at.Sub(begin), a.err
}

// measureAdditions creates Services and waits until each answers.
func (w *world) measureAdditions(ctx context.Context, h *host, _ *process, r *planeResult) error {
	for range w.size.additions {
		time.Sleep(w.size.pause)
		d, err := w.add(ctx, h)
		if err != nil {
			return fmt.Errorf("a new service: %w", err)
		}
		r.additions = append(r.additions, milliseconds.in(d))
	}
	return nil
}

func (w *world) add(ctx context.Context, h *host) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, changeLimit)
	defer cancel()
	w.added++
	begin := time.Now()
	s, err := makeService(ctx, w.client, shape{prefix: "added", endpoints: 1, from: spare + 1_000_000}, w.added)
	if err != nil {
		return 0, err
	}
	var at time.Time
	err = h.on(func() (err error) {
		at, err = until(ctx, s.at, changePause, s.has)
		return err
	})
	return at.Sub(begin), err
}

// proxies measures fairlead and kube-proxy, one after the other, against the
// same API server.
func (b *bench) proxies(ctx context.Context, size planeSize) (mine, peer planeResult, err error) {
	err = b.inWorld(ctx, size, func(w *world) error {
		if mine, err = b.measure(ctx, w, b.fairleadProxy()); err != nil || b.peer("kube-proxy") == "" {
			return err
		}
		w.size = size.forPeer(b.small)
		peer, err = b.measure(ctx, w, b.kubeProxy())
		return err
	})
	return mine, peer, err
}

// inWorld makes a world for f and takes it away again.
func (b *bench) inWorld(ctx context.Context, size planeSize, f func(*world) error) error {
	w, err := b.makeWorld(ctx, size)
	if err != nil {
		return err
	}
	return errors.Join(f(w), w.stop(), w.plain.remove(context.WithoutCancel(ctx)))
}

// waitAnswer waits on the host until a Service answers.
func waitAnswer(ctx context.Context, h *host, s service) (at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = h.on(func() (err error) {
		at, err = until(ctx, s.at, loadPause, s.has)
		return err
	})
	return at, err
}
