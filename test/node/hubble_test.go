package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

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
	socket := filepath.Join(t.TempDir(), "hubble.sock")
	c := newCluster(t, "--hubble-listen-address", "unix://"+socket)
	c.backends()
	c.apply(mustRead(t, "../../examples/debugging.yaml"))
	s := &shell{c: c, program: "/tmp/hubble/hubble"}
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
			return fmt.Errorf("%w, want refused", err)
		}
		return nil
	})
	s.stories()
	s.observes(socket)
	s.refuses(socket)
}

// stories runs the blocks of the page. What a command prints has the lines below it, in their order; "..." stands for anything.
func (s *shell) stories() {
	c := s.c
	c.t.Helper()
	page := strings.ReplaceAll(mustRead(c.t, "../../docs/hubble.md"), "192.0.2.10", c.server.Addr4().String())
	blocks := regexp.MustCompile("(?ms)^<!-- run by test/node/hubble_test.go -->\n```console\n(.*?)^```").FindAllStringSubmatch(page, -1)
	if len(blocks) != 5 {
		c.t.Fatalf("docs/hubble.md has %d blocks to run", len(blocks))
	}
	for _, b := range blocks {
		var commands, want []string
		for line := range strings.Lines(b[1]) {
			line = strings.TrimSuffix(line, "\n")
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands = append(commands, command)
			} else {
				want = append(want, `(?m:^`+strings.ReplaceAll(regexp.QuoteMeta(line), `\.\.\.`, `.*`)+`)`)
			}
		}
		shape := regexp.MustCompile("(?s)" + strings.Join(want, ".*?"))
		testbed.Until(c.t, "the story of "+commands[len(commands)-1], func() error {
			out, err := process.Try(s.command(commands...))
			if err != nil || !shape.MatchString(out) {
				return fmt.Errorf("%w: it printed\n%s\nwant\n%s", err, out, b[1])
			}
			return nil
		})
		if s.before == nil { // the first block has set up the rest
			s.before = commands[:len(commands)-1]
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
	}
}

// observe returns the flows that the command prints.
func (s *shell) observe(args string) (all []seen) {
	c := s.c
	c.t.Helper()
	out := process.Output(c.t, s.command("hubble observe -o jsonpb "+args))
	for line := range strings.Lines(out) {
		var one seen
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			c.t.Fatalf("%v: %s", err, line)
		}
		if one.Flow.NodeName != "" {
			all = append(all, one)
		}
	}
	return all
}

// observes asks by the filters of the command: at the API server and, for what a node knows, at its socket.
func (s *shell) observes(socket string) {
	c := s.c
	c.t.Helper()
	labels := strings.Fields(c.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].metadata.name}"))
	for _, at := range []string{"", " --server unix://" + socket} {
		if at != "" {
			s = &shell{c: c, program: s.program}
		}
		run := func(args string) []seen {
			c.t.Helper()
			if at == "" {
				return s.observe(args)
			}
			cmd := c.on(c.node, s.program, strings.Fields("observe -o jsonpb "+args+at)...)
			out := process.Output(c.t, cmd)
			var all []seen
			for line := range strings.Lines(out) {
				var one seen
				if err := json.Unmarshal([]byte(line), &one); err != nil {
					c.t.Fatalf("%v: %s", err, line)
				}
				all = append(all, one)
			}
			return all
		}
		for filter, right := range map[string]func(seen) bool{
			"--service my-service": func(f seen) bool {
				d := f.Flow.Destination
				return f.Flow.Verdict == "FORWARDED" && f.Flow.Service.Name == "my-service" && slices.Contains(labels, d.Pod) &&
					slices.Contains(d.Labels, "k8s:app=MyApp") && len(d.Workloads) == 1 && f.Flow.NodeName == c.node.Name()
			},
			"--to-label app=MyApp --last 1":          func(f seen) bool { return slices.Contains(labels, f.Flow.Destination.Pod) },
			"--to-pod default/" + labels[0]:          func(f seen) bool { return f.Flow.Destination.Pod == labels[0] },
			"--verdict DROPPED --to-service typo":    func(f seen) bool { return f.Flow.Reason == "SERVICE_BACKEND_NOT_FOUND" },
			"--not --verdict DROPPED --to-port 9376": func(f seen) bool { return f.Flow.Verdict == "FORWARDED" },
			"--service my-service --first 1":         func(f seen) bool { return f.Flow.Service.Name == "my-service" },
			"--since 1h --protocol tcp -t drop":      func(f seen) bool { return f.Flow.Verdict == "DROPPED" },
		} {
			all := run(filter)
			if len(all) == 0 || strings.HasSuffix(filter, " 1") && len(all) != 1 {
				c.t.Errorf("hubble observe %s%s: %d flows", filter, at, len(all))
			}
			for _, f := range all {
				if !right(f) {
					c.t.Errorf("hubble observe %s%s: %+v", filter, at, f)
				}
			}
		}
		for _, filter := range []string{"--service nobody", "--pod kube-system/nobody", "--until 1h"} {
			if all := run(filter); len(all) != 0 {
				c.t.Errorf("hubble observe %s%s: %+v", filter, at, all)
			}
		}
	}
}

// refuses asks as users who may not see flows: one without credentials, one who may edit a namespace, one who is not root at the
// socket of a node. One who has the right may.
func (s *shell) refuses(socket string) {
	c := s.c
	c.t.Helper()
	other := c.on(c.node, "setpriv", "--reuid", "65534", "--clear-groups", s.program, "status", "--server", "unix://"+socket)
	if out, err := process.Try(other); err == nil {
		c.t.Errorf("another user than root reads the flows of the node:\n%s", out)
	}
	c.kubectl("create", "namespace", "own")
	c.kubectl("create", "serviceaccount", "tenant", "-n", "own")
	c.kubectl("create", "rolebinding", "tenant", "-n", "own", "--clusterrole", "admin", "--serviceaccount", "own:tenant")
	token := strings.TrimSpace(c.kubectl("create", "token", "tenant", "-n", "own"))
	check := func(what, token string, want codes.Code) {
		c.t.Helper()
		testbed.Until(c.t, what, func() error {
			client, done := c.observer(s, token)
			defer done()
			_, unary := client.ServerStatus(c.t.Context(), &observer.ServerStatusRequest{})
			_, nodes := client.GetNodes(c.t.Context(), &observer.GetNodesRequest{})
			stream, err := client.GetFlows(c.t.Context(), &observer.GetFlowsRequest{Number: 1})
			if err == nil {
				_, err = stream.Recv()
			}
			for _, got := range []error{unary, nodes, err} {
				if status.Code(got) != want {
					return fmt.Errorf("%w, want %v", got, want)
				}
			}
			return nil
		})
	}
	check("no answer without credentials", "", codes.Unauthenticated)
	check("no answer to a tenant", token, codes.PermissionDenied)
	c.kubectl("create", "clusterrolebinding", "tenant-looks", "--clusterrole", "flow-reader", "--serviceaccount", "own:tenant")
	check("an answer to who may look", token, codes.OK)
}

// observer is a client of the API server for a bearer token.
func (c *cluster) observer(s *shell, token string) (client observer.ObserverClient, done func()) {
	c.t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(mustRead(c.t, filepath.Join(s.c.dir, "ca.crt"))))
	at := netip.AddrPortFrom(c.server.Addr4(), 6443)
	as := func(ctx context.Context) context.Context {
		if token == "" {
			return ctx
		}
		return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	conn, err := grpc.NewClient("passthrough:"+at.String(),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: at.Addr().String(), MinVersion: tls.VersionTLS12})),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return c.node.Dial(ctx, svc.TCP, at) }),
		grpc.WithUnaryInterceptor(func(ctx context.Context, m string, q, a any, cc *grpc.ClientConn, f grpc.UnaryInvoker, o ...grpc.CallOption) error {
			ctx, cancel := context.WithTimeout(as(ctx), 30*time.Second)
			defer cancel()
			return f(ctx, m, q, a, cc, o...)
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, d *grpc.StreamDesc, cc *grpc.ClientConn, m string, f grpc.Streamer,
			o ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			return f(as(ctx), d, cc, m, o...)
		}))
	if err != nil {
		c.t.Fatal(err)
	}
	return observer.NewObserverClient(conn), func() { _ = conn.Close() }
}
