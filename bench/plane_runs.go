package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// only runStress measures fairlead at 10,000 x 10 with what would take
// kube-proxy minutes: half a minute of changes and a burst. What kernel and network
// do alone is the measure.
func (b *bench) runStress(ctx context.Context) ([]figure, error) {
	size := planeSize{
		services: b.few(10000, 60), endpoints: b.few(10, 2), limit: b.limit(),
		churn: b.few(30*churnRate, 10), burst: b.few(1000, 20), throughput: true,
	}
	var r, one, peer planeResult
	var kernel float64
	err := b.inWorld(ctx, size, func(w *world) (err error) {
		if kernel, err = b.kernelAlone(ctx, w); err != nil {
			return err
		}
		r, err = b.measure(ctx, w, b.fairleadProxy())
		return err
	})
	if err != nil {
		return nil, err
	}
	few := planeSize{services: 1, endpoints: 1, limit: b.limit()}
	if err := b.inWorld(ctx, few, func(w *world) (err error) {
		if one, err = b.measure(ctx, w, b.fairleadProxy()); err != nil || b.peer("kube-proxy") == "" {
			return err
		}
		peer, err = b.measure(ctx, w, b.kubeProxy())
		return err
	}); err != nil {
		return nil, err
	}
	at := fmt.Sprintf("at %s", size)
	beside := func(what string, u unit, mine, other float64, name string, want expectation) figure {
		f := unpaired(what, u, mine, want)
		f.peer, f.peerName = other, name
		return f
	}
	rate := func(r planeResult) float64 { return eachSecond(r.through) / eachSecond(r.direct) }
	var theirs float64
	if peer.through != nil {
		theirs = rate(peer)
	}
	return []figure{
		beside("load of "+size.String()+", process start to last answer", seconds, r.load, kernel, "the kernel alone", expectation{share: 2.5}),
		unpaired(fmt.Sprintf("%d changes a second, p50 of %d %s", churnRate, size.churn, at), milliseconds, percentile(r.churn, 0.5),
			expectation{}),
		unpaired(fmt.Sprintf("%d changes a second, p99 of %d %s", churnRate, size.churn, at), milliseconds, percentile(r.churn, 0.99),
			expectation{below: 50}),
		unpaired(fmt.Sprintf("%d changes in %.1f s, last answer after the last write", size.burst, r.burstWrites), milliseconds, r.burst,
			expectation{below: 1000}),
		beside("connect p50 "+at, microseconds, percentile(r.through, 0.5), percentile(r.direct, 0.5), "direct", expectation{}),
		beside("connect p99 "+at, microseconds, percentile(r.through, 0.99), percentile(r.direct, 0.99), "direct", expectation{}),
		beside("connect p50 at 1 service", microseconds, percentile(one.through, 0.5), percentile(one.direct, 0.5), "direct", expectation{}),
		beside("connect p50 "+at+", in that of a direct one", times, r.connect, one.connect, "at 1 service", expectation{share: 1.1}),
		beside("connections a second, one after the other, "+at, perSecond, eachSecond(r.through), eachSecond(r.direct), "direct", expectation{}),
		b.against("the same in that of direct ones, kube-proxy's at 1 service", times, rate(r), theirs, expectation{least: 0.95}),
		beside("an established connection "+at, gigabits, r.throughput, r.directThroughput, "direct", expectation{least: 0.95}),
	}, nil
}

// eachSecond is how many of what took the given microseconds one after the other fit
// into a second.
func eachSecond(took []float64) float64 {
	sum := 0.0
	for _, t := range took {
		sum += t
	}
	return float64(len(took)) / sum * 1e6
}

// runLarge shows that the cost of a change does not grow with everything else.
func (b *bench) runLarge(ctx context.Context) ([]figure, error) {
	size := planeSize{
		services: b.few(50000, 60), endpoints: b.few(10, 2), changes: b.few(50, 3), additions: b.few(5, 2), limit: b.limit(),
		pause: pause,
	}
	var r planeResult
	if err := b.inWorld(ctx, size, func(w *world) (err error) {
		r, err = b.measure(ctx, w, b.fairleadProxy())
		return err
	}); err != nil {
		return nil, err
	}
	change := fmt.Sprintf("endpoint change to packet at %s, %%s of %d", size, size.changes)
	return []figure{
		unpaired(fmt.Sprintf("load of %s, process start to last answer", size), seconds, r.load, expectation{}),
		unpaired(fmt.Sprintf(change, "p50"), milliseconds, percentile(r.changes, 0.5), expectation{below: 10}),
		unpaired(fmt.Sprintf(change, "p99"), milliseconds, percentile(r.changes, 0.99), expectation{below: 25}),
		unpaired(fmt.Sprintf("new service to packet at %s, p50 of %d", size, size.additions), milliseconds, percentile(r.additions, 0.5),
			expectation{below: 20}),
		unpaired("memory of the proxy after the load", megabytes, r.memory, expectation{}),
	}, nil
}

// The variants of iptables, and the programs that have them.
var iptablesVariants = map[string]string{"nft": "xtables-nft-multi", "legacy": "xtables-legacy-multi"}

// iptablesCases are the variants, and the number of Services at which each is
// measured. kube-proxy's time for a load grows with its square under variant nft:
// at 5,000 x 10 it had not ended after five minutes.
var iptablesCases = []struct {
	variant  string
	services int
	load     expectation
}{
	{"nft", 2000, expectation{share: 1. / 20}},
	{"legacy", 10000, expectation{share: 1}},
}

// runIPTables measures iptables mode with both variants.
func (b *bench) runIPTables(ctx context.Context) ([]figure, error) {
	var figures []figure
	for _, c := range iptablesCases {
		path, err := b.variantPath(c.variant)
		if err != nil {
			return figures, err
		}
		size := planeSize{
			services: b.few(c.services, 30), endpoints: b.few(10, 2), changes: b.few(10, 2), pause: pause, limit: b.limit(),
		}
		var mine, peer, one planeResult
		err = b.inWorld(ctx, size, func(w *world) (err error) {
			if mine, err = b.measure(ctx, w, b.fairleadIPTables(path, c.variant)); err != nil {
				return err
			}
			if b.peer("kube-proxy") != "" {
				w.size = size.forPeer(b.small)
				peer, err = b.measure(ctx, w, b.kubeIPTables(path))
			}
			return err
		})
		if err != nil {
			return figures, err
		}
		if err := b.inWorld(ctx, planeSize{services: 1, endpoints: 1, limit: b.limit()}, func(w *world) (err error) {
			one, err = b.measure(ctx, w, b.fairleadIPTables(path, c.variant))
			return err
		}); err != nil {
			return figures, err
		}
		what := c.variant + " variant, "
		same := unpaired(what+"the same beside that at 1 service", times, mine.connect, expectation{share: 1.1})
		same.peer, same.peerName = one.connect, "at 1 service"
		for _, f := range []figure{
			b.against(what+"load of "+size.String(), seconds, mine.load, peer.load, c.load),
			b.against(what+"CPU for it", seconds, mine.loadCPU, peer.loadCPU, expectation{}),
			b.against(fmt.Sprintf("%sendpoint change to packet at %s, p50 of %d", what, size, size.changes), milliseconds,
				percentile(mine.changes, 0.5), percentile(peer.changes, 0.5), expectation{share: 0.1}),
			b.against(what+"connect p50 through a ClusterIP, in that of a direct one", times, mine.connect, peer.connect, expectation{}),
			same,
			b.against(what+"memory of the proxy", megabytes, mine.memory, peer.memory, expectation{}),
		} {
			if f.peerName != "" && f.peerName != same.peerName {
				f.peerName = "kube-proxy iptables"
			}
			figures = append(figures, f)
		}
	}
	return figures, nil
}

// variantPath is a PATH in which the programs called iptables come from a
// variant.
func (b *bench) variantPath(variant string) (string, error) {
	program, err := exec.LookPath(iptablesVariants[variant])
	if err != nil {
		return "", fmt.Errorf("variant %s of iptables: %w", variant, err)
	}
	dir := filepath.Join(b.dir, "iptables-"+variant)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, what := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(program, filepath.Join(dir, name+what)); err != nil && !errors.Is(err, os.ErrExist) {
				return "", err
			}
		}
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH"), nil
}

func (b *bench) fairleadIPTables(path, variant string) proxy {
	return proxy{"fairlead-" + variant, func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "fairlead-proxy", "env", path, b.fairlead, "proxy", "--mode", "iptables", "--iptables-variant", variant,
			"--kubeconfig", kubeconfig, "--node-name", h.name, "--conntrack-max-per-core", "0")
	}}
}

func (b *bench) kubeIPTables(path string) proxy {
	return proxy{"kube-proxy", func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "kube-proxy", "env", path, b.peer("kube-proxy"), "--proxy-mode", "iptables",
			"--kubeconfig", kubeconfig, "--hostname-override", h.name,
			"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0")
	}}
}
