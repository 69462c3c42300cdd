package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// copyCommand is the argument with which this program is the plainest of
// proxies instead.
const copyCommand = "copy"

// copyProxy carries connections with io.Copy, two goroutines for each.
func copyProxy(listen, to string) error {
	l, err := net.Listen("tcp4", listen)
	if err != nil {
		return err
	}
	return serveEach(l, func(c net.Conn) {
		s, err := net.Dial("tcp4", to)
		if err != nil {
			return
		}
		defer s.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.Copy(s, c)
			_ = s.(*net.TCPConn).CloseWrite()
		}()
		_, _ = io.Copy(c, s)
		_ = c.(*net.TCPConn).CloseWrite()
		<-done
	})
}

const (
	loadPort  = 9377 // where the backends' host serves loads
	proxyPort = 8080 // where a peer listens
)

// haproxyConfig and nginxConfig are the shortest that carry TCP. Each uses as
// many threads, or processes, as there are processors.
const (
	haproxyConfig = `global
    maxconn 4000
defaults
    mode tcp
    timeout connect 5s
    timeout client 1m
    timeout server 1m
%slisten load
    bind :%d
    server endpoint %s
`
	// haproxySplicing is the name of HAProxy told to splice.
	haproxySplicing = "HAProxy, splicing"
	nginxConfig     = `load_module %s;
worker_processes auto;
user root;
daemon off;
pid nginx.pid;
error_log stderr crit;
events { worker_connections 4096; }
stream { server { listen %d; proxy_pass %s; } }
`
)

// carrier is a program that carries connections in user space.
type carrier struct {
	name string
	// start starts it. Peers listen on proxyPort.
	start func(h *host, dir string) (*process, error)
	peer  bool
}

// carriers are fairlead and the peers that there are.
func (b *bench) carriers(a *api, endpoint netip.AddrPort) []carrier {
	out := []carrier{{name: "fairlead", start: func(h *host, dir string) (*process, error) {
		return spawn(h, dir, "fairlead", b.fairlead, "proxy", "--mode", "userspace", "--kubeconfig", a.kubeconfig, "--node-name", h.name)
	}}}
	debian := filepath.Join(b.peers, "debian")
	file := func(dir, name, text string) (string, error) {
		path := filepath.Join(dir, name)
		return path, os.WriteFile(path, []byte(text), 0o600)
	}
	if program := b.peer("debian/usr/sbin/haproxy"); program != "" {
		// By itself it copies, and where splice-auto leaves the choice to it, too.
		const splice = "    option splice-request\n    option splice-response\n"
		for _, v := range []struct{ name, options string }{{"HAProxy", ""}, {haproxySplicing, splice}} {
			out = append(out, carrier{v.name, func(h *host, dir string) (*process, error) {
				config, err := file(dir, "haproxy.cfg", fmt.Sprintf(haproxyConfig, v.options, proxyPort, endpoint))
				if err != nil {
					return nil, err
				}
				return spawnDebian(h, debian, dir, "haproxy", program, "-db", "-f", config)
			}, true})
		}
	}
	if program := b.peer("debian/usr/sbin/nginx"); program != "" {
		out = append(out, carrier{"nginx stream", func(h *host, dir string) (*process, error) {
			module := filepath.Join(debian, "usr/lib/nginx/modules/ngx_stream_module.so")
			config, err := file(dir, "nginx.conf", fmt.Sprintf(nginxConfig, module, proxyPort, endpoint))
			if err != nil {
				return nil, err
			}
			return spawnDebian(h, debian, dir, "nginx", program, "-p", dir, "-e", "stderr", "-c", config)
		}, true})
	}
	return append(out, carrier{"io.Copy", func(h *host, dir string) (*process, error) {
		return spawn(h, dir, "copy", b.self, copyCommand, fmt.Sprintf(":%d", proxyPort), endpoint.String())
	}, true})
}

// carried is what was measured through one carrier, one value for each round.
type carried struct {
	stream              []float64 // Gbit/s
	requests, requestP  []float64 // a second; p99 in milliseconds
	connects, connectsP []float64
	// Processor time: in milliseconds for a gigabyte, in microseconds for a
	// request and for a connection.
	streamCPU, requestCPU, connectCPU []float64
}

// carrying is a carrier under load.
type carrying struct {
	carrier
	carried
	load load
	proc *process
	host *host
}

func (b *bench) runUserspace(ctx context.Context) (figures []figure, err error) {
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	endpoint := netip.AddrPortFrom(endpointAddr(0), loadPort)
	vip, err := makeLoadService(ctx, a, endpoint)
	if err != nil {
		return nil, err
	}
	backends, err := hostNamed("backends")
	if err != nil {
		return nil, err
	}
	server, err := serveLoad(backends, loadPort)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	client, err := b.net.host(ctx, fmt.Sprintf("client%d", b.net.count))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, client.remove(context.WithoutCancel(ctx))) }()
	if err := manyPorts(client); err != nil {
		return nil, err
	}
	direct := &carrying{carrier: carrier{name: "direct"}, load: load{client, endpoint}}
	all := []*carrying{direct}
	for i, c := range b.carriers(a, endpoint) {
		// Each has its own address that the client is led to it by.
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 200, 0, byte(i)}), servicePort)
		if !c.peer {
			to = vip
		}
		w, stop, err := b.carry(ctx, a, c, client, to)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, stop()) }()
		all = append(all, w)
	}
	step := time.Duration(b.few(700, 200)) * time.Millisecond
	for round := range b.few(9, 1) {
		// In another order each time: the machine is not the same all the time.
		for i := range all {
			w := all[(i+round)%len(all)]
			if err := w.round(ctx, step); err != nil {
				return nil, errors.Join(fmt.Errorf("%s: %w", w.name, err), w.alive())
			}
		}
	}
	for _, w := range all {
		b.say("%s: %.1f Gbit/s (%.0f ms of CPU for a GB), %.0f requests/s (p99 %.2f ms, CPU %.1f µs), "+
			"%.0f connections/s (p99 %.2f ms, CPU %.0f µs)", w.name,
			median(w.stream), median(w.streamCPU), median(w.requests), median(w.requestP), median(w.requestCPU),
			median(w.connects), median(w.connectsP), median(w.connectCPU))
	}
	return userspaceFigures(direct, all[1], all[2:]), nil
}

func (w *carrying) alive() error {
	if w.proc == nil {
		return nil
	}
	return w.proc.alive()
}

func median(v []float64) float64 { return percentile(v, 0.5) }

// What the load is made of. Few clients keep a proxy's threads busy without
// keeping a queue before them.
const (
	streamConns    = 4
	requestClients = 32
	connectClients = 16
)

// round measures one carrier once.
func (w *carrying) round(ctx context.Context, d time.Duration) error {
	var bits float64
	var r rate
	took, err := w.cpu(func() (err error) {
		bits, err = w.load.stream(ctx, streamConns, d)
		return err
	})
	if err != nil {
		return err
	}
	w.stream = append(w.stream, bits/1e9)
	w.streamCPU = append(w.streamCPU, milliseconds.in(took)/(bits*d.Seconds()/8e9))
	took, err = w.cpu(func() (err error) {
		r, err = w.load.requests(ctx, requestClients, d)
		return err
	})
	if err != nil {
		return err
	}
	w.requests = append(w.requests, r.perSecond)
	w.requestP = append(w.requestP, percentile(r.latency, 0.99))
	w.requestCPU = append(w.requestCPU, microseconds.in(took)/float64(len(r.latency)))
	took, err = w.cpu(func() (err error) {
		r, err = w.load.connections(ctx, connectClients, d)
		return err
	})
	if err != nil {
		return err
	}
	w.connects = append(w.connects, r.perSecond)
	w.connectsP = append(w.connectsP, percentile(r.latency, 0.99))
	w.connectCPU = append(w.connectCPU, microseconds.in(took)/float64(len(r.latency)))
	return nil
}

// cpu is the processor time that the carrier uses while f runs.
func (w *carrying) cpu(f func() error) (time.Duration, error) {
	if w.proc == nil {
		return 0, f()
	}
	before, err := w.proc.groupCPU()
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := w.proc.groupCPU()
	return after - before, err
}

// groupCPU is the processor time of all processes of p's group, in steps of 10
// ms for each.
func (p *process) groupCPU() (time.Duration, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	var ticks int64
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has just ended
		}
		// proc_pid_stat(5): after the name in parentheses the state, the
		// parent, the group; utime and stime are fields 14 and 15.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		if len(fields) < 13 || string(fields[2]) != strconv.Itoa(p.cmd.Process.Pid) {
			continue
		}
		for _, f := range fields[11:13] {
			n, err := strconv.ParseInt(string(f), 10, 64)
			if err != nil {
				return 0, err
			}
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

func userspaceFigures(direct, mine *carrying, peers []*carrying) []figure {
	var out []figure
	added := func(through, direct []float64) float64 { return max(median(through)-median(direct), 0) }
	for _, p := range peers {
		throughput := 1.3
		if p.name == haproxySplicing {
			throughput = 1 // both splice: the rest is the kernel's
		}
		want := func(e expectation) expectation {
			if p.name == "io.Copy" {
				return expectation{} // shown for the gain
			}
			return e
		}
		for _, f := range []figure{
			{what: fmt.Sprintf("throughput of %d connections", streamConns), unit: gigabits, fairlead: median(mine.stream), peer: median(p.stream),
				want: want(expectation{least: throughput})},
			{what: fmt.Sprintf("requests on %d kept connections", requestClients), unit: perSecond, fairlead: median(mine.requests),
				peer: median(p.requests), want: want(expectation{least: 0.9})},
			{what: fmt.Sprintf("new connections of %d clients", connectClients), unit: perSecond, fairlead: median(mine.connects),
				peer: median(p.connects), want: want(expectation{least: 0.9})},
			{what: "CPU for a gigabyte", unit: milliseconds, fairlead: median(mine.streamCPU), peer: median(p.streamCPU)},
			{what: "CPU for a request", unit: microseconds, fairlead: median(mine.requestCPU), peer: median(p.requestCPU)},
			{what: "CPU for a new connection", unit: microseconds, fairlead: median(mine.connectCPU), peer: median(p.connectCPU)},
			{what: "added p99 of a request", unit: milliseconds, fairlead: added(mine.requestP, direct.requestP),
				peer: added(p.requestP, direct.requestP), want: want(expectation{share: 1})},
			{what: "added p99 of a connection", unit: milliseconds, fairlead: added(mine.connectsP, direct.connectsP),
				peer: added(p.connectsP, direct.connectsP), want: want(expectation{share: 1})},
		} {
			f.peerName = p.name
			out = append(out, f)
		}
	}
	if len(peers) == 0 {
		out = append(out, figure{what: "throughput", unit: gigabits, fairlead: median(mine.stream), peer: math.NaN()})
	}
	return out
}

// carry starts a carrier on its own host, to which the client's way to the
// address leads, and waits until it carries.
func (b *bench) carry(ctx context.Context, a *api, c carrier, client *host, to netip.AddrPort) (w *carrying, stop func() error, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("carrier%d", b.net.count))
	if err != nil {
		return nil, nil, err
	}
	w = &carrying{carrier: c, load: load{client, to}, host: h}
	stop = func() error { return h.end(ctx, w.proc) }
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	if err := manyPorts(h); err != nil {
		return nil, nil, err
	}
	if err := ip(ctx, fmt.Sprintf("-n %s route replace %s via %s", client.name, to.Addr(), h.addr)); err != nil {
		return nil, nil, err
	}
	if c.peer {
		// A peer stands where fairlead does: behind a rule that captures.
		err = capture(ctx, h, to)
	} else {
		err = makeNode(ctx, a.client, h)
	}
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp(b.dir, "carrier-")
	if err != nil {
		return nil, nil, err
	}
	if w.proc, err = c.start(h, dir); err != nil {
		return nil, nil, err
	}
	err = waitFor(ctx, time.Minute, 50*time.Millisecond, w.proc, func() error {
		_, err := w.load.requests(ctx, 1, time.Millisecond)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("%s does not carry: %w", c.name, err)
	}
	return w, stop, nil
}

// capture brings connections to an address to the port of a peer.
func capture(ctx context.Context, h *host, to netip.AddrPort) error {
	rules := fmt.Sprintf("add table ip capture; add chain ip capture in { type nat hook prerouting priority -100; }; "+
		"add rule ip capture in ip daddr %s tcp dport %d dnat to %s:%d",
		to.Addr(), to.Port(), h.addr, proxyPort)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nft", rules)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := h.on(cmd.Run); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out.String())
	}
	return nil
}

// manyPorts lets a host open very many connections one after the other.
func manyPorts(h *host) error {
	for key, value := range map[string]string{"net/ipv4/ip_local_port_range": "10000 65000", "net/ipv4/tcp_tw_reuse": "1"} {
		if err := h.sysctl(key, value); err != nil {
			return err
		}
	}
	return nil
}

// hostNamed is a host that was made before.
func hostNamed(name string) (*host, error) {
	f, err := os.Open("/run/netns/" + name)
	if err != nil {
		return nil, err
	}
	return &host{name: name, file: f}, nil
}

// makeLoadService makes a Service of one endpoint.
func makeLoadService(ctx context.Context, a *api, endpoint netip.AddrPort) (netip.AddrPort, error) {
	const name = "load"
	got, err := a.client.CoreV1().Services(benchNamespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: benchNamespace},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: servicePort}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	slice := endpointSlice(name, 0, []netip.Addr{endpoint.Addr()})
	port := int32(endpoint.Port())
	slice.Ports[0].Port = &port
	if _, err := a.client.DiscoveryV1().EndpointSlices(benchNamespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return netip.AddrPort{}, err
	}
	vip, err := netip.ParseAddr(got.Spec.ClusterIP)
	return netip.AddrPortFrom(vip, servicePort), err
}
