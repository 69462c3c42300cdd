package node

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

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

// world is a resolver outside of the cluster that knows www.example.com, and fails for names below fail.example.com.
func world(t *testing.T, on *testbed.Host) netip.AddrPort {
	t.Helper()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := strings.ToLower(q.Question[0].Name)
		if strings.HasSuffix(name, ".fail.example.com.") {
			m.Rcode = dns.RcodeServerFailure
		} else if name != "www.example.com." {
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
	testbed.Receive(t, "the name server to listen", started)
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
