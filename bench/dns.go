package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	dnsPort      = 53
	zoneSuffix   = "." + benchNamespace + ".svc.cluster.local."
	dnsClients   = 8 // each waits for its answer before it asks again
	dnsTimeout   = 2 * time.Second
	dnsReady     = 2 * time.Minute
	headlessSize = 50
)

// corefile is kubeadm's, without what looks out of the cluster or only matters
// over days (health, forward, loop, reload).
const corefile = `.:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig %s
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    cache 30 {
        disable success cluster.local
        disable denial cluster.local
    }
    loadbalance
}
`

// nameserver is a program that answers for the cluster's names.
type nameserver struct {
	name  string
	start func(h *host, dir, kubeconfig string) (*process, error)
}

func (b *bench) fairleadDNS() nameserver {
	return nameserver{"fairlead", func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "fairlead-dns", b.fairlead, "dns", "--kubeconfig", kubeconfig,
			"--listen", netip.AddrPortFrom(h.addr, dnsPort).String(), "--upstream", backendsAddr)
	}}
}

func (b *bench) coreDNS() nameserver {
	return nameserver{"CoreDNS", func(h *host, dir, kubeconfig string) (*process, error) {
		return b.startCoreDNS(h, dir, fmt.Sprintf(corefile, kubeconfig))
	}}
}

func (b *bench) startCoreDNS(h *host, dir, config string) (*process, error) {
	file := filepath.Join(dir, "Corefile")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	return spawn(h, dir, "coredns", b.peer("coredns"), "-conf", file)
}

// question is a kind of question, and what its answer must be.
type question struct {
	name    string
	ask     func(i int) (name string, kind uint16)
	rcode   int
	answers int
}

// dnsWorld is the content of the API for the measurement of names.
type dnsWorld struct {
	services, headless []service
}

func (w dnsWorld) questions() []question {
	return []question{
		{"A", func(i int) (string, uint16) {
			return w.services[i%len(w.services)].name + zoneSuffix, dns.TypeA
		}, dns.RcodeSuccess, 1},
		{"A of a headless service with 50 endpoints", func(i int) (string, uint16) {
			return w.headless[i%len(w.headless)].name + zoneSuffix, dns.TypeA
		}, dns.RcodeSuccess, headlessSize},
		{"SRV", func(i int) (string, uint16) {
			return "_http._tcp." + w.services[i%len(w.services)].name + zoneSuffix, dns.TypeSRV
		}, dns.RcodeSuccess, 1},
		{"NXDOMAIN of the search path", func(i int) (string, uint16) {
			return fmt.Sprintf("www%d.example.com%s", i%1000, zoneSuffix), dns.TypeA
		}, dns.RcodeNameError, 0},
		{"PTR", func(i int) (string, uint16) {
			name, _ := dns.ReverseAddr(w.services[i%len(w.services)].at.Addr().String())
			return name, dns.TypePTR
		}, dns.RcodeSuccess, 1},
	}
}

// dnsResult is what was measured of one server.
type dnsResult struct {
	ready  float64 // seconds
	memory float64 // megabytes
	cost   []float64
	p99    []float64
	rate   []float64
	// perf is what dnsperf had a question cost, by protocol and kind; empty
	// without dnsperf.
	perf map[string][]float64
}

func (b *bench) runDNS(ctx context.Context) (figures []figure, err error) {
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	var w dnsWorld
	ordinary := shape{prefix: "svc", services: b.few(1000, 20), endpoints: b.few(10, 2)}
	if w.services, err = fill(ctx, a.client, ordinary); err != nil {
		return nil, err
	}
	if w.headless, err = fill(ctx, a.client, shape{
		prefix: "headless", services: b.few(20, 2), endpoints: headlessSize, headless: true, from: ordinary.next(),
	}); err != nil {
		return nil, err
	}
	mine, err := b.measureDNS(ctx, a, w, b.fairleadDNS())
	if err != nil {
		return nil, err
	}
	var peer dnsResult
	if b.peer("coredns") != "" {
		if peer, err = b.measureDNS(ctx, a, w, b.coreDNS()); err != nil {
			return nil, err
		}
	}
	return b.dnsFigures(w, mine, peer), nil
}

func (b *bench) dnsFigures(w dnsWorld, mine, peer dnsResult) []figure {
	against := func(what string, u unit, mine float64, peer func() float64, want expectation) figure {
		f := unpaired(what, u, mine, want)
		if b.peer("coredns") != "" {
			f.peer, f.peerName = peer(), "CoreDNS"
		}
		return f
	}
	figures := []figure{
		against(fmt.Sprintf("DNS start to ready, %d services", len(w.services)+len(w.headless)), seconds, mine.ready,
			func() float64 { return peer.ready }, expectation{share: 1. / 3}),
		against("DNS memory after the questions", megabytes, mine.memory, func() float64 { return peer.memory }, expectation{share: 0.5}),
	}
	for i, q := range w.questions() {
		figures = append(figures,
			against("CPU for one question, "+q.name, microseconds, mine.cost[i], func() float64 { return peer.cost[i] }, expectation{share: 1. / 3}),
			against("p99 of "+q.name, microseconds, mine.p99[i], func() float64 { return peer.p99[i] }, expectation{share: 0.5}))
		for _, over := range dnsperfModes {
			if cost := mine.perf[over]; cost != nil {
				figures = append(figures, against("CPU for one question, "+q.name+", dnsperf over "+over, microseconds, cost[i],
					func() float64 { return peer.perf[over][i] }, expectation{share: 1. / 3}))
			}
		}
	}
	return figures
}

// measureDNS runs one server on its own host.
func (b *bench) measureDNS(ctx context.Context, a *api, w dnsWorld, n nameserver) (r dnsResult, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("dns%d", b.net.count))
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	dir, err := os.MkdirTemp(b.dir, n.name+"-")
	if err != nil {
		return r, err
	}
	p, err := n.start(h, dir, a.kubeconfig)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	server := netip.AddrPortFrom(h.addr, dnsPort).String()
	kinds := w.questions()
	// Ready is when the last Service is answered, and each kind is right.
	for i, q := range kinds {
		if err := untilAnswered(ctx, p, server, q, len(w.services)-1); err != nil {
			return r, fmt.Errorf("%s: %s: %w", n.name, q.name, err)
		}
		if i == 0 {
			r.ready = time.Since(p.begin).Seconds()
		}
	}
	for _, q := range kinds {
		if err := b.ask(ctx, p, server, q, &r); err != nil {
			return r, fmt.Errorf("%s: %s: %w", n.name, q.name, err)
		}
	}
	if r.perf, err = b.dnsperf(ctx, p, h.addr, dir, kinds); err != nil {
		return r, fmt.Errorf("%s: %w", n.name, err)
	}
	m, err := p.memory()
	r.memory = m / 1e6
	b.say("%s: ready in %.2f s; µs of CPU for a question %.1f", n.name, r.ready, r.cost)
	return r, err
}

// pack makes question i ready to send.
func (q question) pack(i int) ([]byte, error) {
	name, kind := q.ask(i)
	m := new(dns.Msg).SetQuestion(name, kind)
	m.Id = uint16(i)
	m.SetEdns0(1232, false)
	return m.Pack()
}

// untilAnswered asks every 2 ms until the answer is right. It does so over one
// socket: an answer counts whenever it comes, and the kernel reports ports that
// are not open yet only now and then (icmp(7), icmp_ratelimit).
func untilAnswered(ctx context.Context, p *process, server string, q question, i int) error {
	const pause = 2 * time.Millisecond
	c, err := net.Dial("udp", server)
	if err != nil {
		return err
	}
	defer c.Close()
	packed, err := q.pack(i)
	if err != nil {
		return err
	}
	buf := make([]byte, 4096)
	return waitFor(ctx, dnsReady, 0, p, func() error {
		begin := time.Now()
		if err := c.SetDeadline(begin.Add(pause)); err != nil {
			return err
		}
		var wrong error
		_, err := c.Write(packed)
		for err == nil {
			var n int
			if n, err = c.Read(buf); err != nil {
				break
			}
			if wrong = q.check(buf[:n]); wrong == nil {
				return nil
			}
		}
		time.Sleep(pause - time.Since(begin)) // not listening yet
		return errors.Join(err, wrong)
	})
}

// check returns what is wrong with an answer.
func (q question) check(packed []byte) error {
	var m dns.Msg
	if err := m.Unpack(packed); err != nil {
		return err
	}
	if m.Rcode != q.rcode || len(m.Answer) != q.answers || m.Truncated {
		return fmt.Errorf("answered %s with %d records (truncated %t), not %s with %d",
			dns.RcodeToString[m.Rcode], len(m.Answer), m.Truncated, dns.RcodeToString[q.rcode], q.answers)
	}
	return nil
}

// ask asks many questions of one kind, a fixed number at once, and adds what
// they cost to the result. Every answer must bear the right code.
func (b *bench) ask(ctx context.Context, p *process, server string, q question, r *dnsResult) error {
	each := b.few(20000, 100)
	packed := make([][]byte, 1000)
	for i := range packed {
		var err error
		if packed[i], err = q.pack(i); err != nil {
			return err
		}
	}
	before, err := p.cpu()
	if err != nil {
		return err
	}
	begin := time.Now()
	took := make([][]float64, dnsClients)
	failed := make([]error, dnsClients)
	var wg sync.WaitGroup
	for c := range dnsClients {
		wg.Go(func() { took[c], failed[c] = askMany(ctx, server, packed, c*101, each, q.rcode) })
	}
	wg.Wait()
	if err := errors.Join(failed...); err != nil {
		return err
	}
	all := time.Since(begin)
	after, err := p.cpu()
	if err != nil {
		return err
	}
	asked := float64(each * dnsClients)
	r.cost = append(r.cost, microseconds.in(after-before)/asked)
	r.p99 = append(r.p99, percentile(slices.Concat(took...), 0.99))
	r.rate = append(r.rate, asked/all.Seconds())
	return nil
}

// askMany asks one question after the other over one socket and returns how
// many microseconds each took.
func askMany(ctx context.Context, server string, packed [][]byte, from, n, rcode int) ([]float64, error) {
	c, err := net.Dial("udp", server)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	took := make([]float64, 0, n)
	buf := make([]byte, 4096)
	for i := range n {
		if i%256 == 0 {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err := c.SetDeadline(time.Now().Add(dnsTimeout)); err != nil {
				return nil, err
			}
		}
		ask := packed[(from+i)%len(packed)]
		begin := time.Now()
		if _, err := c.Write(ask); err != nil {
			return nil, err
		}
		n, err := c.Read(buf)
		if err != nil {
			return nil, err
		}
		took = append(took, microseconds.in(time.Since(begin)))
		// RFC 1035, section 4.1.1: the id, and the code in the low four bits.
		if n < 12 || buf[0] != ask[0] || buf[1] != ask[1] || int(buf[3]&15) != rcode {
			return nil, fmt.Errorf("an answer of %d bytes has the wrong id or code (% x)", n, buf[:min(n, 12)])
		}
	}
	return took, nil
}
