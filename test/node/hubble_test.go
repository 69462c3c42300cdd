package node

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// shell runs commands of docs/hubble.md on the server's host.
type shell struct {
	c       *cluster
	program string // hubble
	before  []string
}

func (s *shell) command(lines ...string) *exec.Cmd {
	bin := s.c.path("bin")
	cmd := s.c.on(s.c.server, "sh", "-e", "-c", strings.Join(slices.Concat(s.before, lines), "\n"))
	cmd.Dir = s.c.dir
	cmd.Env = append(cmd.Env, "PATH="+bin+":"+os.Getenv("PATH"))
	return cmd
}

// TestHubble runs the hubble command of docs/hubble.md, unmodified, at the API server and at the socket of a node.
func TestHubble(t *testing.T) {
	t.Parallel()
	open := openDir(t)
	socket := filepath.Join(open, "hubble.sock")
	c := newCluster(t, "--hubble-listen-address", "unix://"+socket)
	c.backends()
	c.apply(mustRead(t, "../../examples/debugging.yaml"))
	s := &shell{c: c, program: process.Build(t, "test/hubble", "github.com/cilium/cilium/hubble")}
	bin := c.path("bin")
	for name, to := range map[string]string{"hubble": s.program, "kubectl": process.Program("kubectl")} {
		if err := os.MkdirAll(bin, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	testbed.Until(t, "a refusal by a Service without endpoints", func() error {
		if err := c.dial(c.frontend("my-service")); err != nil {
			return err
		}
		if err := c.dial(c.frontend("typo")); !testbed.Refused(err) {
			return fmt.Errorf("%v, want refused", err)
		}
		return nil
	})
	s.applications()
	s.stories()
	s.observes(socket)
	s.watches(socket)
	s.counts()
	s.program = copied(t, s.program, filepath.Join(open, "hubble"))
	s.refuses(socket)
}

// routed is a Service with a route at it: one path has no endpoint.
const routed = `
apiVersion: v1
kind: Service
metadata: {name: shop}
spec: {selector: {app: MyApp}, ports: [{port: 80, targetPort: 9376}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: shop}
spec:
  parentRefs: [{group: "", kind: Service, name: shop}]
  rules:
  - matches: [{path: {value: /cart}}]
    backendRefs: [{name: typo, port: 80}]
  - backendRefs: [{name: shop, port: 80}]
`

// applications waits until the node carries requests as the route says, and makes them and a question of DNS.
func (s *shell) applications() {
	c := s.c
	c.t.Helper()
	file := c.path("routed.yaml")
	if err := os.WriteFile(file, []byte(routed), 0o600); err != nil {
		c.t.Fatal(err)
	}
	testbed.Until(c.t, "the API server has the kind of routes", func() error {
		_, err := c.try("apply", "-f", file)
		return err
	})
	shop := c.frontend("shop")
	testbed.Until(c.t, "requests go by the route", func() error { return c.requests(shop) })
	c.tracesRequests(shop)
	c.name("my-service.default.svc.cluster.local.")
}

// tracesRequests traces a request for each path of the route: the node names the rule, and the Pod, or why it has answered itself.
func (c *cluster) tracesRequests(shop string) {
	c.t.Helper()
	config := c.path("kubeconfig-of-the-node")
	text := strings.ReplaceAll(mustRead(c.t, c.path("server/admin.kubeconfig")), "127.0.0.1", c.server.Addr4().String())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	trace := func(args ...string) string {
		return process.Output(c.t, c.fairlead(c.node, append([]string{"trace", "--kubeconfig", config, "--address", shop}, args...)...))
	}
	for url, want := range map[string]struct {
		status, rule int
		backend      string
		text         []string
	}{
		"http://shop/x?q": {200, 1, "default/shop", []string{
			"GET http://shop/x?q: 200 OK\n", "  by rule 2 of HTTPRoute default/shop  [HTTPRoute default/shop spec.rules[1]]\n",
			"  led to Service default/shop  ", "  Pod myapp-", " answered 200  ",
		}},
		"http://shop/cart/7": {503, 0, "default/typo", []string{
			"GET http://shop/cart/7: 503 Service Unavailable\n", "  answered itself with 503: ",
			"  Service default/shop took it at " + shop + " from ",
		}},
	} {
		var r explaincmd.RequestReport
		out := trace("-o", "json", url)
		if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Seen) != 1 {
			c.t.Fatalf("%s: %v: %s", url, err, out)
		}
		s := r.Seen[0]
		if r.Status != want.status || s.Status != want.status || s.Node != c.node.Name() || s.Front != "default/shop" || s.Client != r.From ||
			s.Route == nil || s.Route.Rule != want.rule || s.Backend != want.backend || (s.Why == "") != (want.status == 200) {
			c.t.Errorf("%s: %s", url, out)
		}
		text := trace(url)
		for _, w := range want.text {
			if !strings.Contains(text, w) {
				c.t.Errorf("%s: no %q in %s", url, w, text)
			}
		}
	}
	story := regexp.MustCompile("(?ms)^<!-- run by test/node/hubble_test.go -->\n```console\n\\$ fairlead trace ([^\n]*)\n(.*?)^```").
		FindStringSubmatch(mustRead(c.t, "../../docs/debugging.md"))
	if story == nil {
		c.t.Fatal("docs/debugging.md has no trace of a request to run")
	}
	const address = "203.0.113.7:80" // of the page
	told := trace(strings.Fields(strings.ReplaceAll(story[1], address, shop))...)
	if lines := strings.Split(strings.TrimSpace(strings.ReplaceAll(story[2], address, shop)), "\n"); !shapeOf(lines, false).MatchString(told) {
		c.t.Errorf("fairlead trace %s printed\n%s\nwant\n%s", story[1], told, story[2])
	}
	if text := trace("http://other/", "-X", "POST", "-H", "X-A: b", "--address", c.frontend("my-service")); !strings.Contains(text,
		"none of 1 load balancers has seen it") {
		c.t.Errorf("a request that no load balancer carries: %s", text)
	}
}

// requests makes a request for each path of the route, at the frontend of its Service.
func (c *cluster) requests(shop string) error {
	at := netip.MustParseAddrPort(shop)
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return c.node.Dial(ctx, svc.TCP, at) },
	}}
	for path, want := range map[string]int{"/cart/7?token=secret": 503, "/": 200} {
		answer, err := client.Get("http://shop" + path)
		if err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode != want {
			return fmt.Errorf("%s: %s, want %d", path, answer.Status, want)
		}
	}
	return nil
}

// name asks the DNS server of the node for the addresses of a name.
func (c *cluster) name(name string) {
	c.t.Helper()
	testbed.Until(c.t, "an answer for "+name, func() error {
		return askOnce(c.node, new(dns.Msg).SetQuestion(name, dns.TypeA))
	})
}

// openDir returns a directory that every user can enter, unlike that of a test.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hubble-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// copied copies a program to a path where every user may run it.
func copied(t *testing.T, program, to string) string {
	t.Helper()
	if err := os.WriteFile(to, []byte(mustRead(t, program)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(to, 0o755); err != nil { // whatever the umask is
		t.Fatal(err)
	}
	return to
}

// stories runs the blocks of the page. What a command prints has the lines below it, in their order; "..." stands for any text of a line.
func (s *shell) stories() {
	c := s.c
	c.t.Helper()
	page := strings.ReplaceAll(mustRead(c.t, "../../docs/hubble.md"), "192.0.2.10", c.server.Addr4().String())
	blocks := regexp.MustCompile("(?ms)^<!-- run by test/node/hubble_test.go -->\n```console\n(.*?)^```").FindAllStringSubmatch(page, -1)
	if len(blocks) != 7 {
		c.t.Fatalf("docs/hubble.md has %d blocks to run", len(blocks))
	}
	served, typo := c.frontend("my-service"), c.frontend("typo")
	for _, b := range blocks {
		var commands, want []string
		for line := range strings.Lines(b[1]) {
			line = strings.TrimSuffix(line, "\n")
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands = append(commands, command)
			} else {
				want = append(want, `(?m:^`+strings.ReplaceAll(regexp.QuoteMeta(line), `\.\.\.`, `[^\n]*`)+`)`)
			}
		}
		shape := regexp.MustCompile("(?s)" + strings.Join(want, ".*?"))
		testbed.Until(c.t, "the story of "+commands[len(commands)-1], func() error {
			// A flow within a second after its Service was programmed may be without it.
			_, _ = c.dial(served), c.dial(typo)
			out, err := process.Try(s.command(commands...))
			if err != nil || !shape.MatchString(out) {
				return fmt.Errorf("%v: it printed\n%s\nwant\n%s", err, out, b[1])
			}
			return nil
		})
		// What the first block exports is for the others, too.
		for _, command := range commands {
			if strings.HasPrefix(command, "export ") {
				s.before = append(s.before, command)
			}
		}
	}
}

// seen are the parts of a flow that the test compares.
type seen struct {
	Flow struct {
		NodeName    string `json:"node_name"`
		Verdict     string `json:"verdict"`
		Reason      string `json:"drop_reason_desc"`
		Destination struct {
			Namespace string   `json:"namespace"`
			Pod       string   `json:"pod_name"`
			Labels    []string `json:"labels"`
			Workloads []struct{ Name, Kind string }
		}
		Service struct{ Name, Namespace string } `json:"destination_service"`
		L7      struct {
			HTTP struct{ URL string }
		}
	}
}

// flows returns the flows that a hubble command prints.
func (s *shell) flows(cmd *exec.Cmd) (all []seen) {
	s.c.t.Helper()
	for line := range strings.Lines(process.Output(s.c.t, cmd)) {
		var one seen
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			s.c.t.Fatalf("%v: %s", err, line)
		}
		if one.Flow.NodeName != "" { // otherwise it is about nodes or lost events
			all = append(all, one)
		}
	}
	return all
}

// observes asks by the filters of the command at the API server, and at the socket of the node. (How filters choose is a matter of the
// tests of internal/hubble.)
func (s *shell) observes(socket string) {
	c := s.c
	c.t.Helper()
	pods := strings.Fields(c.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].metadata.name}"))
	server := func(filter string) []seen { return s.flows(s.command("hubble observe -o jsonpb " + filter)) }
	node := func(filter string) []seen {
		return s.flows(c.on(c.node, s.program, strings.Fields("observe -o jsonpb --server unix://"+socket+" "+filter)...))
	}
	served := func(f seen) bool {
		d := f.Flow.Destination
		return f.Flow.Verdict == "FORWARDED" && f.Flow.Service.Name == "my-service" && slices.Contains(pods, d.Pod) &&
			slices.Contains(d.Labels, "k8s:app=MyApp") && len(d.Workloads) == 1 && f.Flow.NodeName == c.node.Name()
	}
	refused := func(f seen) bool {
		return f.Flow.Verdict == "DROPPED" && f.Flow.Reason == "SERVICE_BACKEND_NOT_FOUND" && f.Flow.Service.Name == "typo"
	}
	lost := func(f seen) bool {
		return f.Flow.Verdict == "DROPPED" && f.Flow.Service.Name == "typo" && f.Flow.L7.HTTP.URL == "http://shop/cart/7"
	}
	none := func(seen) bool { return false }
	for _, q := range []struct {
		ask    func(string) []seen
		filter string
		right  func(seen) bool
	}{
		{server, "--service my-service", served},
		{server, "--to-label app=MyApp --service my-service --last 1", served},
		{server, "--tcp-flags SYN --service my-service", served},
		{server, "--not --verdict FORWARDED --to-service typo --since 1h", refused},
		{server, "--service nobody", none},
		{server, "--protocol http --verdict DROPPED", lost},
		{server, "--http-path ^/cart/ --http-method get --not-reply", lost},
		{node, "--protocol dns --type l7", func(f seen) bool { return f.Flow.Verdict == "FORWARDED" }},
		{node, "--service my-service --first 1", served},
		{node, "--verdict DROPPED --service typo", refused},
	} {
		all := q.ask(q.filter)
		wrong := slices.ContainsFunc(all, func(f seen) bool { return !q.right(f) })
		if wrong || len(all) == 0 && !strings.HasSuffix(q.filter, "nobody") || strings.HasSuffix(q.filter, " 1") && len(all) != 1 {
			c.t.Errorf("hubble observe %s: %+v", q.filter, all)
		}
	}
}

// watches looks at the nodes as they come and go, at the API server and at the socket of the node.
func (s *shell) watches(socket string) {
	c := s.c
	c.t.Helper()
	for want, cmd := range map[string]*exec.Cmd{
		"PEER_ADDED   " + c.node.Addr4().String() + ":": s.command("exec hubble watch peers"),
		"PEER_ADDED   unix://" + socket + " ":           c.on(c.node, s.program, "watch", "peers", "--server", "unix://"+socket),
	} {
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			c.t.Fatal(err)
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, want) || !strings.Contains(line, c.node.Name()) {
			c.t.Errorf("hubble watch peers: %v: %q, want %q", err, line, want)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// counts looks for the flows of applications in the metrics of the node.
func (s *shell) counts() {
	c := s.c
	c.t.Helper()
	metrics := process.Output(c.t, c.node.Command(c.t.Context(), "curl", "-sS", "--max-time", "30", "http://127.0.0.1:10249/metrics"))
	for _, want := range []string{
		`hubble_http_requests_total{method="GET",protocol="HTTP/1.1",reporter="client",status="503"} `,
		`hubble_drop_total{protocol="HTTP",reason="SERVICE_BACKEND_NOT_FOUND"} `,
		`hubble_dns_queries_total{ips_returned="0",qtypes="A",rcode=""} `,
	} {
		if !strings.Contains(metrics, "\n"+want) {
			c.t.Errorf("the metrics have no %s", want)
		}
	}
}

// refuses asks as users who may not see flows: one without credentials, one who may edit a namespace, one who is not root at the
// socket of a node. A user with the right gets answers.
func (s *shell) refuses(socket string) {
	c := s.c
	c.t.Helper()
	other := func(args ...string) (string, error) {
		as := []string{"--reuid", "65534", "--regid", "65534", "--clear-groups", s.program}
		return process.Try(c.on(c.node, "setpriv", slices.Concat(as, args)...))
	}
	if out, err := other("version"); err != nil {
		c.t.Errorf("another user than root cannot run the command: %v\n%s", err, out)
	}
	ask := []string{"status", "--server", "unix://" + socket}
	if out, err := other(ask...); err == nil || !strings.Contains(err.Error()+out, "connect: permission denied") {
		c.t.Errorf("another user than root asks the node for its flows: %v\n%s", err, out)
	}
	process.Output(c.t, c.on(c.node, s.program, ask...))
	c.kubectl("create", "namespace", "own")
	c.kubectl("create", "serviceaccount", "tenant", "-n", "own")
	c.kubectl("create", "rolebinding", "tenant", "-n", "own", "--clusterrole", "admin", "--serviceaccount", "own:tenant")
	token := strings.TrimSpace(c.kubectl("create", "token", "tenant", "-n", "own"))
	check := func(what, token string, want codes.Code) {
		c.t.Helper()
		testbed.Until(c.t, what, func() error {
			client, done := c.observer(s, token)
			defer done()
			ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
			defer cancel()
			_, unary := client.ServerStatus(ctx, &observer.ServerStatusRequest{})
			_, nodes := client.GetNodes(ctx, &observer.GetNodesRequest{})
			stream, err := client.GetFlows(ctx, &observer.GetFlowsRequest{Number: 1})
			if err == nil {
				_, err = stream.Recv()
			}
			for _, got := range []error{unary, nodes, err} {
				if status.Code(got) != want {
					return fmt.Errorf("%v, want %v", got, want)
				}
			}
			return nil
		})
	}
	check("no answer without credentials", "", codes.Unauthenticated)
	check("no answer to a tenant", token, codes.PermissionDenied)
	c.kubectl("create", "clusterrolebinding", "tenant-looks", "--clusterrole", "flow-reader", "--serviceaccount", "own:tenant")
	check("an answer to a flow-reader", token, codes.OK)
	c.follows(s, token)
}

// follows gets a connection as it happens from the API server.
func (c *cluster) follows(s *shell, token string) {
	c.t.Helper()
	client, done := c.observer(s, token)
	defer done()
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	stream, err := client.GetFlows(ctx, &observer.GetFlowsRequest{
		Follow: true, Whitelist: []*flow.FlowFilter{{DestinationService: []string{"default/my-service"}}},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		m, err := stream.Recv()
		for err == nil && m.GetFlow() == nil {
			m, err = stream.Recv()
		}
		got <- err
	}()
	at := c.frontend("my-service")
	testbed.Until(c.t, "a flow as it happens", func() error {
		if err := c.dial(at); err != nil {
			return err
		}
		select {
		case err := <-got:
			if err != nil {
				c.t.Fatal(err)
			}
			return nil
		default:
			return errors.New("none yet")
		}
	})
}

// observer is a client of the API server for a bearer token.
func (c *cluster) observer(s *shell, token string) (client observer.ObserverClient, done func()) {
	c.t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(mustRead(c.t, filepath.Join(s.c.dir, "ca.crt"))))
	at := netip.AddrPortFrom(c.server.Addr4(), 6443)
	conn, err := grpc.NewClient("passthrough:"+at.String(),
		grpc.WithTransportCredentials(credentials.NewTLS(
			&tls.Config{RootCAs: pool, ServerName: at.Addr().String(), MinVersion: tls.VersionTLS12})),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return c.node.Dial(ctx, svc.TCP, at) }),
		grpc.WithPerRPCCredentials(bearer(token)))
	if err != nil {
		c.t.Fatal(err)
	}
	return observer.NewObserverClient(conn), func() { _ = conn.Close() }
}

// bearer is a token, or "" for a client without credentials.
type bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (bearer) RequireTransportSecurity() bool { return true }
