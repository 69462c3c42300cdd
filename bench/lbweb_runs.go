package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// step is a load, of which each round gives values.
type step struct {
	name     string
	protocol string
	run      func(context.Context, webLoad, time.Duration) (rate, float64, error)
	want     expected
}

// expected is what a step should reach of a peer's figures, 0 for nothing.
type expected struct {
	peer     string  // everyPeer for each of them
	least    float64 // requests, connections or bytes a second
	cpu, p99 float64 // at most
}

const (
	haproxyPeer = "HAProxy"
	everyPeer   = ""
)

func ofHAProxy(least, p99 float64) expected {
	return expected{peer: haproxyPeer, least: least, p99: p99}
}

// keptRequests are requests on connections that are kept. least is the share of HAProxy's requests.
func keptRequests(protocol string, least float64) step {
	return step{fmt.Sprintf("requests on %d kept connections", requestClients), protocol, keptStep, ofHAProxy(least, 1.5)}
}

// steps of a listener of TCP or HTTP.
func plainSteps(protocol string, least float64) []step {
	return []step{
		keptRequests(protocol, least),
		{"new connections of 16 clients", protocol, openedStep(false), ofHAProxy(1, 1.5)},
		{"body over 4 connections", protocol, delugeStep, expected{}},
	}
}

func tlsSteps() []step {
	return []step{
		keptRequests("https", 0.7),
		{"new connections of 16 clients, full handshakes", "https", openedStep(false), ofHAProxy(1, 1.5)},
		{"new connections of 16 clients, resumed sessions", "https", openedStep(true), ofHAProxy(1, 0)},
		{"body over 4 connections", "https", delugeStep, expected{}},
	}
}

func keptStep(ctx context.Context, l webLoad, d time.Duration) (rate, float64, error) {
	r, err := l.kept(ctx, requestClients, d)
	return r, 0, err
}

func openedStep(resume bool) func(context.Context, webLoad, time.Duration) (rate, float64, error) {
	return func(ctx context.Context, l webLoad, d time.Duration) (rate, float64, error) {
		r, err := l.opened(ctx, connectClients, d, resume)
		return r, 0, err
	}
}

func delugeStep(ctx context.Context, l webLoad, d time.Duration) (rate, float64, error) {
	bits, err := l.deluge(ctx, streamConns, d)
	return rate{}, bits, err
}

// values are the values of a step at a carrier, one for each round.
type values struct{ perSecond, p50, p99, cpu []float64 }

// measureSteps takes turns between the carriers, in another order each round.
func (w *webRig) measureSteps(ctx context.Context, steps []step) (map[string][]values, error) {
	out := map[string][]values{}
	for _, c := range w.carriers {
		out[c.name] = make([]values, len(steps))
	}
	d := time.Duration(w.bench.few(700, 100)) * time.Millisecond
	for round := range w.bench.few(7, 1) {
		for i, s := range steps {
			for j := range w.carriers {
				c := w.carriers[(j+round)%len(w.carriers)]
				before, err := c.proc.groupCPU()
				if err != nil {
					return nil, err
				}
				r, bits, err := s.run(ctx, w.load(c, s.protocol), d)
				if err != nil {
					return nil, errors.Join(fmt.Errorf("%s, %s, %s: %w", c.name, s.protocol, s.name, err), c.proc.alive())
				}
				after, err := c.proc.groupCPU()
				if err != nil {
					return nil, err
				}
				v := &out[c.name][i]
				if bits > 0 {
					v.perSecond = append(v.perSecond, bits/1e9)
					v.cpu = append(v.cpu, milliseconds.in(after-before)/(bits*d.Seconds()/8e9))
					continue
				}
				v.perSecond = append(v.perSecond, r.perSecond)
				v.p50 = append(v.p50, percentile(r.latency, 0.5))
				v.p99 = append(v.p99, percentile(r.latency, 0.99))
				v.cpu = append(v.cpu, microseconds.in(after-before)/float64(len(r.latency)))
			}
		}
	}
	return out, nil
}

// stepFigures are the figures of fairlead beside each peer.
func (w *webRig) stepFigures(steps []step, got map[string][]values) (out []figure) {
	mine := got[w.carriers[0].name]
	peers := w.carriers[1:]
	if len(peers) == 0 {
		peers = w.carriers[:1]
	}
	for _, p := range peers {
		theirs := got[p.name]
		for i, s := range steps {
			add := func(what string, u unit, mine, theirs []float64, want expectation) {
				if s.want.peer != everyPeer && s.want.peer != p.name {
					want = expectation{}
				}
				out = append(out, figure{
					what: s.protocol + ": " + what, unit: u, fairlead: median(mine), peer: median(theirs), peerName: p.name, want: want,
				})
			}
			m, t := mine[i], theirs[i]
			if len(m.p50) == 0 {
				add(s.name, gigabits, m.perSecond, t.perSecond, expectation{least: s.want.least})
				add("… CPU for a gigabyte", milliseconds, m.cpu, t.cpu, expectation{})
				continue
			}
			add(s.name, perSecond, m.perSecond, t.perSecond, expectation{least: s.want.least})
			add("… CPU for one", microseconds, m.cpu, t.cpu, expectation{share: s.want.cpu})
			add("… p50", milliseconds, m.p50, t.p50, expectation{})
			add("… p99", milliseconds, m.p99, t.p99, expectation{share: s.want.p99})
		}
	}
	return out
}

// idleFigures are the memory of each carrier with very many connections that wait. Where open files are limited to
// less (fairlead's load balancer takes an eighth of them for a Service) the rest is reckoned.
func (w *webRig) idleFigures(protocol string) (out []figure, err error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, err
	}
	const all = 10_000
	n := min(w.bench.few(all, 50), int(limit.Max)/8-100)
	sizes := map[string]float64{}
	for _, c := range w.carriers {
		time.Sleep(time.Duration(w.bench.few(70, 0)) * time.Second) // what the load before has left, it has given back, once a minute at most
		before, err := c.proc.groupMemory()
		if err != nil {
			return nil, err
		}
		done, err := w.load(c, protocol).idle(n)
		if err == nil {
			time.Sleep(time.Duration(w.bench.few(10, 0)) * time.Second) // what an idle connection gives back, it has given back
			sizes[c.name], err = c.proc.groupMemory()
			sizes[c.name] += max(0, sizes[c.name]-before) * float64(all-n) / float64(n)
		}
		done()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	what := fmt.Sprintf("%s: memory with %d idle connections", protocol, all)
	if n < all {
		what += fmt.Sprintf(", reckoned from %d", n)
	}
	mine := unpaired(what, megabytes, sizes[w.carriers[0].name]/1e6, expectation{below: 200})
	for _, c := range w.carriers[1:] {
		f := mine
		f.peer, f.peerName = sizes[c.name]/1e6, c.name
		out = append(out, f)
		mine.want = expectation{}
	}
	if len(out) == 0 {
		out = append(out, mine)
	}
	return out, nil
}

// groupMemory is the memory of all processes of p's group.
func (p *process) groupMemory() (float64, error) {
	pids, err := p.group()
	if err != nil {
		return 0, err
	}
	total := 0.0
	for _, pid := range pids {
		m, err := kilobytesOf(pid, "smaps_rollup", "Pss:")
		if err != nil {
			return 0, err
		}
		total += m
	}
	return total, nil
}

// reloadFigure counts the clients for which anything fails while certificates and endpoints change.
func (w *webRig) reloadFigure(ctx context.Context) (figure, error) {
	stop, ended := context.WithCancel(ctx)
	mine := w.carriers[0]
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	requests := 0
	d := time.Duration(w.bench.few(5000, 500)) * time.Millisecond
	for _, protocol := range []string{"http", "https"} {
		for _, run := range []func() (rate, error){
			func() (rate, error) { return w.load(mine, protocol).kept(stop, 4, d) },
			func() (rate, error) { return w.load(mine, protocol).opened(stop, 2, d, false) },
		} {
			wg.Go(func() {
				r, err := run()
				mu.Lock()
				defer mu.Unlock()
				requests += len(r.latency)
				if err != nil {
					failed = append(failed, fmt.Errorf("%s: %w", protocol, err))
				}
			})
		}
	}
	var err error
	changes := 0
	for begin := time.Now(); time.Since(begin) < d*9/10 && err == nil; changes++ {
		err = errors.Join(w.certificate(ctx), w.setPods(ctx, webPods()[:2+changes%2]))
		time.Sleep(50 * time.Millisecond)
	}
	wg.Wait()
	ended()
	for _, f := range failed {
		w.bench.say("during changes: %v", f)
	}
	return unpaired(fmt.Sprintf("clients that fail during %d changes of certificates and backends, %d requests", changes, requests), pieces,
		float64(len(failed)), expectation{below: 1}), errors.Join(err, w.setPods(ctx, webPods()))
}

func (b *bench) runLBHTTP(ctx context.Context) (figures []figure, err error) {
	steps := append(plainSteps("tcp", 1), plainSteps("http", 0.9)...)
	err = b.inWeb(ctx, 0, false, func(w *webRig) error { return w.run(ctx, steps, "http", &figures) })
	return figures, err
}

func (b *bench) runLBTLS(ctx context.Context) (figures []figure, err error) {
	err = b.inWeb(ctx, 0, false, func(w *webRig) error {
		if err := w.run(ctx, tlsSteps(), "https", &figures); err != nil {
			return err
		}
		f, err := w.reloadFigure(ctx)
		figures = append(figures, f)
		return err
	})
	return figures, err
}

// run measures steps, and idle connections of a listener unless that is empty.
func (w *webRig) run(ctx context.Context, steps []step, idle string, out *[]figure) error {
	got, err := w.measureSteps(ctx, steps)
	if err != nil {
		return err
	}
	*out = w.stepFigures(steps, got)
	if idle == "" {
		return nil
	}
	figures, err := w.idleFigures(idle)
	*out = append(*out, figures...)
	return err
}

// group are the processes of p's group.
func (p *process) group() (pids []int, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has just ended
		}
		// proc_pid_stat(5): after the name in parentheses the state, the parent, the group.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		if len(fields) < 3 || string(fields[2]) != strconv.Itoa(p.cmd.Process.Pid) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
