package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// churnRate is how many changes a second are made for a time, churnPause how
// often each of them is looked for: several are at once.
const (
	churnRate  = 20
	churnPause = time.Millisecond
)

// measureChurn changes endpoints at a fixed rate, whether the proxy keeps up or
// not, and measures each change as change does.
func (w *world) measureChurn(ctx context.Context, h *host, proc *process, r *planeResult) error {
	if w.size.churn == 0 {
		return nil
	}
	if err := proc.settle(time.Minute); err != nil {
		return err
	}
	tick := time.NewTicker(time.Second / churnRate)
	defer tick.Stop()
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	for i := range w.size.churn {
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
		s, to := w.movable[i%len(w.movable)], w.next()
		g.Go(func() error {
			d, err := w.moveTo(ctx, h, s, to, churnPause)
			mu.Lock()
			defer mu.Unlock()
			r.churn = append(r.churn, milliseconds.in(d))
			return err
		})
	}
	return g.Wait()
}

// measureBurst changes many Services as fast as the API server takes it and
// measures how long after the last write the last of them is reached.
func (w *world) measureBurst(ctx context.Context, h *host, proc *process, r *planeResult) error {
	if w.size.burst == 0 {
		return nil
	}
	if err := proc.settle(time.Minute); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, changeLimit)
	defer cancel()
	to := make([]netip.Addr, w.size.burst)
	begin := time.Now()
	g, writing := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range to {
		to[i] = w.next()
		g.Go(func() error {
			_, err := w.client.DiscoveryV1().EndpointSlices(benchNamespace).Update(writing,
				endpointSlice(w.services[i].name, 0, []netip.Addr{to[i]}), metav1.UpdateOptions{})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	written := time.Now()
	r.burstWrites = written.Sub(begin).Seconds()
	last := written
	err := h.on(func() error {
		for i := range to {
			if a, err := ask(w.services[i].at); err == nil && a == to[i] {
				continue
			}
			at, err := until(ctx, w.services[i].at, churnPause, func(a netip.Addr) bool { return a == to[i] })
			if err != nil {
				return fmt.Errorf("change %d of a burst: %w", i, err)
			}
			last = at
		}
		return nil
	})
	r.burst = milliseconds.in(last.Sub(written))
	return err
}

// throughputTime is how long each connection carries what it can, in
// throughputRounds of one through a ClusterIP and one direct.
const (
	throughputTime   = time.Second
	throughputRounds = 5
)

// measureThroughput lets established connections carry bytes, through a
// ClusterIP and directly, in turns.
func (w *world) measureThroughput(ctx context.Context, h *host, _ *process, r *planeResult) error {
	if !w.size.throughput {
		return nil
	}
	through := w.services[len(w.services)/2]
	direct := netip.AddrPortFrom(endpointAddr(through.first), backendPort)
	var rates [2][]float64
	for range throughputRounds {
		for kind, way := range []struct {
			from *host
			to   netip.AddrPort
		}{{h, through.at}, {w.plain, direct}} {
			var n int64
			begin := time.Now()
			err := way.from.on(func() (err error) {
				n, err = receive(ctx, way.to)
				return err
			})
			if err != nil {
				return fmt.Errorf("bytes from %s: %w", way.to, err)
			}
			rates[kind] = append(rates[kind], float64(n)*8/1e9/time.Since(begin).Seconds())
		}
	}
	r.throughput, r.directThroughput = percentile(rates[0], 0.5), percentile(rates[1], 0.5)
	return nil
}

// receive counts the bytes that an endpoint sends within throughputTime.
func receive(ctx context.Context, from netip.AddrPort) (n int64, err error) {
	c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", from.String())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(throughputTime)); err != nil {
		return 0, err
	}
	buf := make([]byte, 256<<10)
	if _, err := c.Read(buf); err != nil { // the endpoint's address
		return 0, err
	}
	if _, err := c.Write([]byte{flood}); err != nil {
		return 0, err
	}
	for {
		m, err := c.Read(buf)
		n += int64(m)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// kernelAlone is how long the kernel works to take as many map elements as the
// Services of a world need, of the same types, from nft(8): its system time
// alone, without reading the text.
func (b *bench) kernelAlone(ctx context.Context, w *world) (seconds float64, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("kernel%d", b.net.count))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	var text bytes.Buffer
	text.WriteString("table ip baseline {\n map vips { type ipv4_addr . inet_proto . inet_service : mark . mark; elements = {\n")
	for _, s := range w.services {
		fmt.Fprintf(&text, "%s . tcp . %d : %d . %d,\n", s.at.Addr(), s.at.Port(), s.count, s.count)
	}
	text.WriteString("} }\n map endpoints { type ipv4_addr . inet_proto . inet_service . mark : ipv4_addr . inet_service; elements = {\n")
	for _, s := range w.services {
		for i := range s.count {
			fmt.Fprintf(&text, "%s . tcp . %d . %d : %s . %d,\n", s.at.Addr(), s.at.Port(), i, endpointAddr(s.first+uint32(i)), backendPort)
		}
	}
	text.WriteString("} }\n}\n")
	file := filepath.Join(b.dir, "baseline.nft")
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nft", "-f", file)
	var out []byte
	err = h.on(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("nft -f: %w: %s", err, out)
	}
	return cmd.ProcessState.SystemTime().Seconds(), nil
}
