package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The addresses of the Service kube-dns.
const (
	clusterDNS  = "10.96.0.10"
	clusterDNS6 = "fd00:10:96::a"
)

// build runs a compiler in testdata and returns the program's path.
func (c *cluster) build(name, compiler string, args ...string) string {
	c.t.Helper()
	out := c.path(name)
	cmd := exec.Command(compiler, append(args, "-o", out)...)
	if compiler == "go" { // the file comes last
		last := len(args) - 1
		cmd = exec.Command(compiler, slices.Concat(args[:last], []string{"-o", out}, args[last:])...)
	}
	cgo := "0"
	if slices.Contains(args, "netcgo") {
		cgo = "1"
	}
	cmd.Dir, cmd.Env = "testdata", append(os.Environ(), "CGO_ENABLED="+cgo)
	if text, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("%s: %v\n%s", cmd, err, text)
	}
	return out
}

// world is a resolver outside of the cluster that knows www.example.com.
func world(t *testing.T, on *testbed.Host) netip.AddrPort {
	t.Helper()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		if !strings.EqualFold(q.Question[0].Name, "www.example.com.") {
			m.Rcode = dns.RcodeNameError
		} else if q.Question[0].Qtype == dns.TypeA {
			m.Answer = append(m.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
				A:   netip.MustParseAddr("203.0.113.7").AsSlice(),
			})
		}
		_ = w.WriteMsg(m)
	})
	at := netip.AddrPortFrom(on.Addr4(), 53)
	started := make(chan struct{}, 1)
	server := &dns.Server{Addr: at.String(), Net: "udp", Handler: handler, NotifyStartedFunc: func() { started <- struct{}{} }}
	var done sync.WaitGroup
	done.Go(func() {
		on.Do(func() {
			if err := server.ListenAndServe(); err != nil {
				t.Error(err)
			}
		})
	})
	<-started
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		done.Wait()
	})
	return at
}

// pod starts a Pod that runs a command for ever and returns its name once it
// runs.
func (c *cluster) pod(app, node string, command ...string) string {
	c.t.Helper()
	process.Output(c.t, c.fairlead(c.server, append([]string{"run", "-d", "-l", "app=" + app, "--node", node, "--"}, command...)...))
	var name string
	testbed.Until(c.t, "Pod "+app+" to run", func() error {
		f := strings.Fields(c.kubectl("get", "pods", "-l", "app="+app, "-o", "jsonpath={.items[*].metadata.name} {.items[*].status.phase}"))
		if len(f) != 2 || f[1] != "Running" {
			return fmt.Errorf("%v", f)
		}
		name = f[0]
		return nil
	})
	return name
}

// tracked are the connection tracking entries of the Service kube-dns on a host.
func tracked(t *testing.T, on *testbed.Host) string {
	t.Helper()
	var all []byte
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := on.Command(t.Context(), "conntrack", "-L", "-f", family).Output()
		if err != nil {
			t.Fatalf("conntrack -L on %s: %v", on.Name(), err)
		}
		all = append(all, out...)
	}
	var lines []string
	for line := range strings.Lines(string(all)) {
		if strings.Contains(line, "="+clusterDNS+" ") || strings.Contains(line, "="+clusterDNS6+" ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// many is a headless Service of 100 addresses: more than fit into an answer
// over UDP.
func (c *cluster) many() []string {
	c.t.Helper()
	var addrs []string
	var y strings.Builder
	y.WriteString("apiVersion: v1\nkind: Service\nmetadata: {name: many}\nspec: {clusterIP: None, ports: [{port: 80}]}\n---\n" +
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nports: [{port: 80}]\n" +
		"metadata: {name: many-1, labels: {kubernetes.io/service-name: many}}\nendpoints:\n")
	for i := range 100 {
		addrs = append(addrs, fmt.Sprintf("10.9.0.%d", i+1))
		fmt.Fprintf(&y, "- addresses: [%s]\n", addrs[i])
	}
	file := c.path("many.yaml")
	if err := os.WriteFile(file, []byte(y.String()), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("apply", "-f", file)
	slices.Sort(addrs)
	return addrs
}

// The resolvers that programs have (glibc's and musl's in C, Go's own and Go's
// through glibc), and dig, inside a Pod, which has "search default.svc.… svc.…
// cluster.local" and "ndots:5" (behaviours 73 to 83): short and long names, names
// that do not exist, names of the outside, answers that fit UDP and that do not.
func TestResolversInPods(t *testing.T) {
	t.Parallel()
	const upstream = "192.168.77.13" // the third host
	c := newCluster(t, "--upstream", upstream)
	if at := world(t, c.network.Outside("world")); at.Addr().String() != upstream {
		t.Fatalf("the outside is at %s", at)
	}
	service := c.backends().Addr().String()
	pod := strings.Fields(c.started())[0]
	many := strings.Join(c.many(), " ")
	resolvers := []struct{ name, program string }{
		{"Go", c.build("resolve-go", "go", "build", "resolve.go")},
		{"Go with cgo", c.build("resolve-cgo", "go", "build", "-tags", "netcgo", "resolve.go")},
		{"glibc", c.build("resolve-glibc", "gcc", "-O1", "resolve.c")},
		{"musl", c.build("resolve-musl", "musl-gcc", "-O1", "-static", "resolve.c")},
	}
	want := map[string]string{
		"my-service":                                 service,
		"my-service.default":                         service,
		"my-service.default.svc":                     service,
		"my-service.default.svc.cluster.local":       service,
		"MY-Service.default.svc.cluster.local.":      service,
		"kubernetes":                                 "10.96.0.1",
		"kube-dns.kube-system":                       clusterDNS,
		"www.example.com":                            "203.0.113.7",
		"no-such-service":                            "error",
		"no-such-service.default.svc.cluster.local.": "error",
		"no-such-host.example.com":                   "error",
		"many":                                       many,
	}
	names := make([]string, 0, len(want))
	for name := range want {
		names = append(names, name)
	}
	slices.Sort(names)
	ask := func(who, options string, program string) {
		t.Helper()
		out := c.kubectl(slices.Concat([]string{"exec", pod, "--", "env", "RES_OPTIONS=" + options, program}, names)...)
		lines := strings.Split(out, "\n")
		if len(lines) != len(names) {
			t.Fatalf("%s printed %q", who, out)
		}
		for i, line := range lines {
			name, got, _ := strings.Cut(line, " ")
			if strings.HasPrefix(got, "error") {
				got = "error"
			}
			addrs := strings.Fields(got)
			slices.Sort(addrs)
			got = strings.Join(slices.Compact(addrs), " ")
			if name == "many" && who == "musl" && len(addrs) > 0 {
				// Before 1.2.4 musl has no TCP: it takes what fits.
				for _, a := range addrs {
					if !strings.Contains(" "+many+" ", " "+a+" ") {
						t.Errorf("musl: many has %s", a)
					}
				}
				continue
			}
			// An IPv6 address of a Service with both families may be there too.
			if name != names[i] || got != want[name] && !strings.HasPrefix(got, want[name]+" fd00:10:96:") {
				t.Errorf("%s (%s): %s is %q, not %q", who, options, names[i], got, want[names[i]])
			}
		}
	}
	for _, r := range resolvers {
		ask(r.name, "", r.program)
	}
	// Every question over TCP, which glibc can be told.
	ask("glibc over TCP", "use-vc", resolvers[2].program)
	for _, over := range []string{"+notcp", "+tcp"} {
		out := c.kubectl("exec", pod, "--", "dig", "+search", "+short", over, "my-service", "A")
		if out != service {
			t.Errorf("dig %s: my-service is %q", over, out)
		}
	}
	if seen := tracked(t, c.node); seen != "" {
		t.Errorf("connection tracking entries of DNS:\n%s", seen)
	}
}

// nodeLocalAlone runs 'fairlead dns --node-local' on a host without an agent, as on
// the nodes of another Kubernetes: what runs there is answered at the address of
// kube-dns over UDP and TCP, IPv4 and IPv6, without connection tracking entries,
// and at the end nothing is left.
func (c *cluster) nodeLocalAlone(name, want string) {
	t := c.t
	t.Helper()
	host := c.network.Outside("plain")
	admin, err := os.ReadFile(c.path("server/admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := c.path("plain.kubeconfig")
	remote := strings.ReplaceAll(string(admin), "127.0.0.1", c.server.Addr4().String())
	if err := os.WriteFile(kubeconfig, []byte(remote), 0o600); err != nil {
		t.Fatal(err)
	}
	server := process.Start(t, c.fairlead(host, "dns", "--kubeconfig", kubeconfig,
		"--node-local", clusterDNS+","+clusterDNS6, "--upstream", "127.0.0.1:9"))
	run := func(args ...string) (string, error) {
		return process.Try(host.Command(t.Context(), args[0], args[1:]...))
	}
	rules := []string{"nft", "list", "table", "inet", "fairlead-dns"}
	testbed.Until(c.t, "the rules of dns --node-local", func() error {
		_, err := run(rules...)
		return err
	})
	for _, at := range []string{"127.0.0.1", clusterDNS, clusterDNS6} {
		for _, over := range []string{"+notcp", "+tcp"} {
			if out, err := run("dig", "+short", "+time=2", "+tries=5", name, "@"+at, over); err != nil || out != want {
				t.Errorf("dns --node-local: dig @%s %s: %q, %v", at, over, out, err)
			}
		}
	}
	if seen := tracked(t, host); seen != "" {
		t.Errorf("dns --node-local: connection tracking entries of DNS:\n%s", seen)
	}
	server.Stop()
	if out, err := run(rules...); err == nil {
		t.Errorf("left by dns --node-local:\n%s", out)
	}
	if out, err := run("ip", "route", "show", "table", "local"); err != nil || strings.Contains(out, clusterDNS) {
		t.Errorf("left by dns --node-local: %v\n%s", err, out)
	}
}

// Every mode of the proxy leaves DNS on the node alone: no connection tracking
// entry for it, from Pods and from the node itself, over UDP and TCP, IPv4 and
// IPv6. The Service kube-dns still lists the servers. When the agent ends, other
// nodes' servers answer.
func TestNodeLocalDNS(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	other := c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other")
	testbed.Until(c.t, "both servers behind kube-dns", func() error {
		out := c.kubectl("-n", "kube-system", "get", "endpointslices", "-l", "kubernetes.io/service-name=kube-dns",
			"-o", "jsonpath={.items[*].endpoints[*].addresses[0]}")
		if len(strings.Fields(out)) != 2 {
			return errors.New(out)
		}
		return nil
	})
	service := c.backends().Addr().String()
	c.nodeLocalAlone("my-service.default.svc.cluster.local", service)
	pod := strings.Fields(c.started())[0]
	// What it sends comes to the node from outside, like a Pod's packets, but
	// needs no agent.
	client := c.network.Outside("client")
	client.Route(netip.MustParsePrefix(clusterDNS+"/32"), c.node.Addr4())
	client.Route(netip.MustParsePrefix(clusterDNS6+"/128"), c.node.Addr6())
	question := []string{"dig", "+short", "+time=2", "+tries=5", "my-service.default.svc.cluster.local"}
	ask := func(where string, servers ...string) {
		t.Helper()
		for _, at := range servers {
			for _, over := range []string{"+notcp", "+tcp"} {
				for _, from := range []*testbed.Host{c.node, client} {
					out, err := from.Command(t.Context(), question[0], append(question[1:], "@"+at, over)...).CombinedOutput()
					if err != nil || strings.TrimSpace(string(out)) != service {
						t.Errorf("%s: from %s, dig @%s %s: %q, %v", where, from.Name(), at, over, out, err)
					}
				}
			}
		}
	}
	flush := func() {
		t.Helper()
		if out, err := c.node.Command(t.Context(), "conntrack", "-F").CombinedOutput(); err != nil {
			t.Fatalf("conntrack -F: %v\n%s", err, out)
		}
	}
	installed := func() error {
		out, err := c.node.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-dns").CombinedOutput()
		if err == nil && !strings.Contains(string(out), "dnat ip to "+other.Addr4().String()+":10053") {
			err = errors.New("the other server is not in it")
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	for _, flags := range [][]string{
		nil, {"--mode", "iptables", "--iptables-variant", "nft"}, {"--mode", "iptables", "--iptables-variant", "legacy"},
	} {
		mode := "mode " + strings.Join(append(flags, "auto")[:min(4, len(flags)+1)], " ")
		if flags != nil {
			c.agentFlags = flags
			c.startAgent()
		}
		testbed.Until(c.t, "rules for DNS in "+mode, installed)
		c.agentUp()
		flush()
		ask(mode, clusterDNS, clusterDNS6)
		for _, over := range []string{"+notcp", "+tcp"} {
			if out := c.kubectl(slices.Concat([]string{"exec", pod, "--"}, question, []string{"@" + clusterDNS, over})...); out != service {
				t.Errorf("%s: from a Pod, dig %s: %q", mode, over, out)
			}
		}
		if seen := tracked(t, c.node); seen != "" {
			t.Errorf("%s: connection tracking entries of DNS:\n%s", mode, seen)
		}
		c.agent.Stop()
		if err := installed(); err == nil {
			t.Errorf("%s: the rules are still there after the agent's end", mode)
		}
		// The other node's server, by the proxy's rules.
		ask(mode+", agent ended", clusterDNS)
		if seen := tracked(t, c.node); !strings.Contains(seen, "src="+other.Addr4().String()) {
			t.Errorf("%s: the other server has not answered:\n%s", mode, seen)
		}
	}
}

// failures are the look-ups of a watching Pod that failed: when they began and
// ended, in milliseconds of Unix time. asked is how many there were after a time.
func failures(out string, after int64) (failed [][2]int64, asked int) {
	var first, last int
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		at, _ := strconv.ParseInt(f[2], 10, 64)
		switch f[0] {
		case "failed":
			failed = append(failed, [2]int64{n, at})
		case "asked":
			if last = int(n); at < after {
				first = last
			}
		}
	}
	return failed, last - first
}

// stall is a time in which a goroutine had something to do and was not let.
type stall struct{ begin, end time.Time }

// stalls notes until the test ends when this machine kept a goroutine waiting
// that wanted to run every millisecond. The function it returns adds up those
// between two times.
func stalls(t *testing.T) func(from, to time.Time) time.Duration {
	const every, harmless = time.Millisecond, 3 * time.Millisecond
	var mu sync.Mutex
	var all []stall
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		timer := time.NewTimer(every)
		defer timer.Stop()
		for {
			due := time.Now().Add(every)
			timer.Reset(every)
			select {
			case <-ended:
				return
			case <-timer.C:
			}
			if now := time.Now(); now.Sub(due) > harmless {
				mu.Lock()
				all = append(all, stall{due, now})
				mu.Unlock()
			}
		}
	})
	t.Cleanup(func() { close(ended); wg.Wait() })
	return func(from, to time.Time) (sum time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range all {
			if s.begin.Before(from) {
				s.begin = from
			}
			if s.end.After(to) {
				s.end = to
			}
			sum += max(0, s.end.Sub(s.begin))
		}
		return sum
	}
}

// One of two servers behind kube-dns is killed without a chance to withdraw: no
// look-up fails that begins 100 ms after its end. Neither in a Pod on the node of the
// killed one, whose questions are led elsewhere by the kernel when the socket is
// gone; nor in one that reaches kube-dns by the proxy, from which the other
// server takes the endpoint. Time in which the machine was too busy to run what
// was ready does not count.
func TestKilledDNSServer(t *testing.T) {
	c := newCluster(t)
	other := c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other", "--node-local-dns=false")
	c.nodesReady(2)
	c.backends()
	watch := c.build("resolve-go", "go", "build", "resolve.go")
	pods := map[string]string{}
	for _, node := range []string{"node", "other"} {
		pods[node] = c.pod("on-"+node, node, watch, "-watch", "my-service.default.svc.cluster.local.")
	}
	progress := func(pod string, after int64, n int) {
		t.Helper()
		testbed.Until(c.t, "look-ups in "+pod, func() error {
			if _, asked := failures(c.kubectl("logs", pod), after); asked < n {
				return fmt.Errorf("%d of %d", asked, n)
			}
			return nil
		})
	}
	for _, pod := range pods {
		progress(pod, 0, 100)
	}
	testbed.Until(c.t, "the other server to look after this one", func() error {
		out, err := other.Command(t.Context(), "ss", "-Htn", "dst", c.node.Addr4().String()+":10053").Output()
		if err == nil && len(out) == 0 {
			err = errors.New("no connection")
		}
		return err
	})
	stalled := stalls(t)
	ready := func() string {
		return c.kubectl("-n", "kube-system", "get", "endpointslice", "kube-dns-node", "-o", "jsonpath={.endpoints[*].conditions.ready}")
	}
	signalled := time.Now().UnixMilli()
	c.agent.Kill()
	killed := time.Now()
	progress(pods["other"], signalled, 200)
	if endpoints := ready(); endpoints != "false" {
		t.Errorf("the killed server is ready=%s behind kube-dns", endpoints)
	}
	c.startAgent()
	testbed.Until(c.t, "the killed server to be back", func() error {
		if out := ready(); out != "true" {
			return fmt.Errorf("ready=%s", out)
		}
		return nil
	})
	progress(pods["node"], signalled, 200)
	for node, pod := range pods {
		failed, asked := failures(c.kubectl("logs", pod), signalled)
		t.Logf("%s: %d of %d look-ups failed after the kill", node, len(failed), asked)
		for _, f := range failed {
			if f[0] < signalled {
				t.Logf("%s: a look-up failed %d ms before the kill", node, signalled-f[0])
				continue
			}
			begin := time.UnixMilli(f[0])
			after, lost := begin.Sub(killed), stalled(killed, begin)
			t.Logf("%s: a look-up begun %s after the kill failed; the machine was busy for %s of that", node, after, lost)
			if after-lost > 100*time.Millisecond {
				t.Errorf("%s: that was too late", node)
			}
		}
	}
}
