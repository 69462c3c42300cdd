package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// corefiles is the folder of the Corefiles of distributions and clouds.
const corefiles = "internal/corefile/testdata"

// corefileQuestions is how many questions both servers get under each Corefile.
const corefileQuestions = 2000

// runCorefiles has CoreDNS and fairlead serve each Corefile, one after the other, and asks
// both the same questions. A difference without a known reason is an error.
func (b *bench) runCorefiles(ctx context.Context) (figures []figure, err error) {
	stop, err := serveWorld()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	if err := fillCluster(ctx, a.client, filepath.Join(b.sources, namesCluster)); err != nil {
		return nil, err
	}
	table, err := readQuestions(filepath.Join(b.sources, namesQuestions))
	if err != nil {
		return nil, err
	}
	questions := manyQuestions(table, b.few(corefileQuestions, len(table)))
	files, err := filepath.Glob(filepath.Join(b.sources, corefiles, "*.Corefile"))
	if err != nil || len(files) < 9 {
		return nil, errors.Join(err, fmt.Errorf("%d Corefiles in %s, want at least 9", len(files), corefiles))
	}
	asked, differ, unexplained := 0, 0, 0
	for _, file := range files {
		d, u, err := b.compareCorefile(ctx, a, file, questions)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
		asked, differ, unexplained = asked+len(questions), differ+d, unexplained+u
	}
	figures = append(figures, unpaired("questions asked under the Corefiles of distributions", pieces, float64(asked), expectation{}),
		unpaired("of them answered otherwise than by CoreDNS, for a reason", pieces, float64(differ-unexplained), expectation{}))
	if unexplained > 0 {
		err = fmt.Errorf("%d answers differ from CoreDNS's without a known reason", unexplained)
	}
	return figures, err
}

// manyQuestions fills the table up to n: names of the Corefiles' own zones, names outside of the
// cluster, and names of the table in random case and with another type. The same on each call.
func manyQuestions(table []asked, n int) []asked {
	out := slices.Clone(table)
	for _, name := range []string{
		"node-a.", "static.example.net.", "web.example.org.", "x.puglife.local.", "a.acme.local.", "www.example.com.", "x.foo.com.",
		"a.b.c.d.internal.cloudapp.net.", "a.internal.cloudapp.net.", "x.reddog.microsoft.com.", "hostname.bind.", "localhost.",
	} {
		out = append(out, asked{name, dns.TypeA}, asked{name, dns.TypeAAAA}, asked{name, dns.TypeTXT})
	}
	random := rand.New(rand.NewPCG(1, 2))
	types := []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypePTR, dns.TypeTXT, dns.TypeMX, dns.TypeNS}
	for len(out) < n {
		q := table[random.IntN(len(table))]
		switch random.IntN(4) {
		case 0:
			q = asked{fmt.Sprintf("n%d.example.com.", random.IntN(1000)), types[random.IntN(2)]}
		case 1:
			q.kind = types[random.IntN(len(types))]
		default:
			name := []byte(q.name)
			for i, c := range name {
				if c >= 'a' && c <= 'z' && random.IntN(2) == 0 {
					name[i] -= 'a' - 'A'
				}
			}
			q.name = string(name)
		}
		out = append(out, q)
	}
	return out[:n]
}

// compareCorefile asks both servers under one Corefile, and returns how many answers differ and
// for how many of them no reason is known.
func (b *bench) compareCorefile(ctx context.Context, a *api, file string, questions []asked) (differ, unexplained int, err error) {
	mine, err := b.corefileAnswers(ctx, a, "fairlead", file, questions)
	if err != nil || b.peer("coredns") == "" {
		return 0, 0, err
	}
	theirs, err := b.corefileAnswers(ctx, a, "CoreDNS", file, questions)
	if err != nil {
		return 0, 0, err
	}
	for i, q := range questions {
		if mine[i].String() == theirs[i].String() {
			continue
		}
		differ++
		lower := asked{strings.ToLower(q.name), q.kind}
		if explain(lower, mine[i], theirs[i]) == "" {
			unexplained++
			fmt.Printf("%s: %s: NO REASON KNOWN\n  fairlead  %s\n  CoreDNS   %s\n", filepath.Base(file), q, mine[i], theirs[i])
		}
	}
	return differ, unexplained, nil
}

// corefileAnswers starts a server with a Corefile on its own host, and asks it everything.
func (b *bench) corefileAnswers(ctx context.Context, a *api, name, file string, questions []asked) (out []answered, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("core%d", b.net.count))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	dir, err := os.MkdirTemp(b.dir, name+"-")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, os.DirFS(filepath.Dir(file))); err != nil {
		return nil, err
	}
	port, err := adaptCorefile(h, dir, file, a.kubeconfig)
	if err != nil {
		return nil, err
	}
	program, args := b.peer("coredns"), []string{"-conf", filepath.Join(dir, "Corefile")}
	if name == "fairlead" {
		program, args = b.fairlead, []string{"dns", "--corefile", filepath.Join(dir, "Corefile"), "--kubeconfig", a.kubeconfig}
	}
	p, err := spawn(h, dir, strings.ToLower(name), program, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	c := &dns.Client{Net: "tcp", Timeout: 10 * time.Second}
	ask := func(q asked) (*dns.Msg, error) {
		m, _, err := c.ExchangeContext(ctx, new(dns.Msg).SetQuestion(q.name, q.kind), netip.AddrPortFrom(h.addr, port).String())
		return m, err
	}
	err = waitFor(ctx, dnsReady, 10*time.Millisecond, p, func() error {
		m, err := ask(asked{"mixed.prod.svc.cluster.local.", dns.TypeA})
		if err == nil && len(m.Answer) == 0 && !strings.Contains(file, "nodelocaldns") {
			err = errors.New("no answer yet")
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for _, q := range questions {
		m, err := ask(q)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", name, q, err)
		}
		out = append(out, newAnswered(m))
	}
	return out, nil
}

// adaptCorefile writes a Corefile as it is served on host h: resolvers are the one of this
// machine, addresses are the host's. It returns the port of the last block.
func adaptCorefile(h *host, dir, file, kubeconfig string) (port uint16, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	resolver := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolver, []byte("nameserver "+switchAddr+"\n"), 0o600); err != nil {
		return 0, err
	}
	adapt := strings.NewReplacer(
		"/etc/resolv.conf", resolver, "k3s/NodeHosts", filepath.Join(dir, "k3s/NodeHosts"),
		"169.254.20.10 10.96.0.10", h.addr.String(), "169.254.20.10", h.addr.String(),
		"{$POD_IP}", h.addr.String(), "192.0.2.10", switchAddr, "192.0.2.53 192.0.2.54", switchAddr, "192.0.2.53 tls://192.0.2.54", switchAddr,
		"192.0.2.53", switchAddr, "tls_servername dns.example.com\n", "", "\n    kubernetes cluster.local in-addr.arpa ip6.arpa {\n",
		"\n    kubernetes cluster.local in-addr.arpa ip6.arpa {\n      kubeconfig "+kubeconfig+"\n",
		"kubernetes   cluster.local  cluster.local in-addr.arpa ip6.arpa {\n",
		"kubernetes   cluster.local  cluster.local in-addr.arpa ip6.arpa {\n      kubeconfig "+kubeconfig+"\n",
	)
	adapted := adapt.Replace(string(text))
	port = 53
	if strings.Contains(adapted, ".:5353 {") {
		port = 5353
	}
	if err := os.WriteFile(filepath.Join(dir, "Corefile"), []byte(adapted), 0o600); err != nil {
		return 0, err
	}
	// The files that are imported name the same resolver.
	return port, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".server") {
			return err
		}
		part, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, []byte(adapt.Replace(string(part))), 0o600)
	})
}
