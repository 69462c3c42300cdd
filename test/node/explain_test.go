package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// stories runs the commands of docs/debugging.md that are marked so: curl on the node, fairlead on the server. The node is called
// node1 there. The lines below a command must be in what it prints, in this order; "..." stands for anything. What an agent has not
// programmed yet it explains a moment later.
func (c *cluster) stories() {
	c.t.Helper()
	c.before(mustRead(c.t, "../../examples/debugging.yaml"))
	page := mustRead(c.t, "../../docs/debugging.md")
	blocks := regexp.MustCompile("(?ms)^<!-- run by test/node/explain_test.go -->\n```console\n(.*?)^```").FindAllStringSubmatch(page, -1)
	if len(blocks) != 23 {
		c.t.Fatalf("docs/debugging.md has %d blocks to run", len(blocks))
	}
	for _, b := range blocks {
		lines := strings.Split(strings.TrimSpace(strings.ReplaceAll(b[1], "node1", c.node.Name())), "\n")
		if args, ok := strings.CutPrefix(lines[0], "$ curl "); ok {
			_, stderr, code := process.Result(c.t, c.node.Command(c.t.Context(), "curl", strings.Fields(args)...))
			if code != 0 && code != noAnswer {
				c.t.Errorf("curl %s: exit code %d: %s", args, code, stderr)
			}
			lines = lines[1:]
		}
		// The time of the page is now: the agent has not run for long.
		lines[0] = strings.ReplaceAll(lines[0], "12:03", time.Now().UTC().Format(time.RFC3339))
		args, ok := strings.CutPrefix(lines[0], "$ fairlead ")
		if !ok || len(lines) < 2 {
			c.t.Fatalf("a block that is no command with its output: %q", b[1])
		}
		shape := shapeOf(lines[1:], strings.HasPrefix(args, "top "))
		end := func() {}
		if args == "explain removed" {
			end = c.removes()
		}
		testbed.Until(c.t, "the story of fairlead "+args, func() error {
			out := process.Output(c.t, c.fairlead(c.server, strings.Fields(args)...))
			if !shape.MatchString(out) {
				return fmt.Errorf("fairlead %s printed\n%s\nwant\n%s", args, out, strings.Join(lines[1:], "\n"))
			}
			return nil
		})
		end()
	}
}

// shapeOf matches an output that has lines of a page in their order; "..." stands for anything. Lines of a table may have wider columns.
func shapeOf(lines []string, table bool) *regexp.Regexp {
	var want []string
	for _, l := range lines {
		pattern := strings.ReplaceAll(regexp.QuoteMeta(l), `\.\.\.`, `.*`)
		if table {
			pattern = tableRow(pattern)
		}
		want = append(want, `(?m:^\s*`+pattern+`)`)
	}
	return regexp.MustCompile("(?s)" + strings.Join(want, ".*?"))
}

// before applies the examples, and does what happened before the stories: the status has an address, and a client was kept at an
// endpoint before there were others.
func (c *cluster) before(examples string) {
	c.t.Helper()
	first, later, ok := strings.Cut(examples, "# Later ")
	if !ok {
		c.t.Fatal("examples/debugging.yaml has nothing that comes later")
	}
	c.apply(first)
	c.kubectl("patch", "service", "ranged", "--subresource=status", "--patch",
		`{"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.90"}]}}}`)
	testbed.Until(c.t, "the endpoint that keeps clients", func() error {
		if out := process.Output(c.t, c.fairlead(c.server, "explain", "sticky")); !strings.Contains(out, string(explain.NoRoute)) {
			return errors.New(out)
		}
		return nil
	})
	_, stderr, code := process.Result(c.t, c.node.Command(c.t.Context(), "curl", "--max-time", "1", "http://10.96.77.79"))
	if code != noAnswer {
		c.t.Errorf("an endpoint that does not answer: exit code %d: %s", code, stderr)
	}
	c.apply("# " + later)
}

// removes has another program remove the Service removed from the kernel until the function that it returns is called.
func (c *cluster) removes() (end func()) {
	c.t.Helper()
	// One nft that reads commands: a start for each takes longer than the agent's repair.
	nft := c.node.Command(c.t.Context(), "sh", "-c", "exec nft --interactive >/dev/null 2>&1")
	commands, err := nft.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	other := process.Start(c.t, nft)
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				if _, err := io.WriteString(commands, "delete element ip fairlead vips { 10.96.77.80 . tcp . 80 }\n"); err != nil {
					return // it has ended
				}
			}
		}
	})
	return func() {
		close(stop)
		other.Kill()
		writing.Wait()
	}
}

// noAnswer is the exit code of curl when the time is over.
const noAnswer = 28

var (
	spaces = regexp.MustCompile(` +`)
	counts = regexp.MustCompile(`\b[1-9]\d*\b`)
)

// tableRow makes the pattern of a line a pattern of a row of a table: its columns may be wider, and its numbers others, but 0 is 0 and no
// other number is.
func tableRow(pattern string) string {
	return spaces.ReplaceAllLiteralString(counts.ReplaceAllLiteralString(pattern, `[1-9]\d*`), ` +`) + `$`
}

// explains asks about a Service that answers, from a Pod: the endpoints are both Pods, and the node's kernel is the proof; then
// for what another program has removed, and of a user who may not ask nodes.
func (c *cluster) explains() {
	c.t.Helper()
	ask := func(args ...string) *explain.Verdict {
		c.t.Helper()
		var r explaincmd.Report
		out := process.Output(c.t, c.fairlead(c.server, append([]string{"explain", "-o", "json"}, args...)...))
		if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Verdicts) != 1 {
			c.t.Fatalf("%v: %s", err, out)
		}
		return r.Verdicts[0]
	}
	pod := strings.Fields(c.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].metadata.name}"))[0]
	v := ask("my-service", "--from", pod)
	if v.Answer != explain.Answers || v.Cause != "" || v.Node != c.node.Name() || v.Mode != "nft" || len(v.Frontends) != 1 ||
		len(v.Frontends[0].Endpoints) != 2 || len(v.Frontends[0].Proof) < 4 || len(v.Endpoints) != 2 || !v.Endpoints[0].May {
		c.t.Errorf("my-service from %s: %+v", pod, v)
	}
	if !strings.Contains(fmt.Sprint(v.Frontends[0].Proof), "map endpoints") {
		c.t.Errorf("the kernel's elements are not shown: %+v", v.Frontends[0].Proof)
	}
	at := netip.MustParseAddrPort(v.Frontends[0].Address)
	conn, err := c.node.Dial(c.t.Context(), svc.TCP, at)
	if err != nil {
		c.t.Fatal(err)
	}
	text := fmt.Sprint(ask("my-service"))
	_ = conn.Close()
	for _, want := range []string{`tracked connections: [1-9]\d* connection tracking of node node\}\]`,
		`\{route: device \S+, from \S+ routes of node node\} \{tracked connections: [1-9]`} {
		if !regexp.MustCompile(want).MatchString(text) {
			c.t.Errorf("while a connection is open, no %s in %s", want, text)
		}
	}
	for _, wrong := range [][]string{{"10.96.0.1"}, {"a/b/c"}, {"my-service", "--protocol", "icmp"}, {}} {
		var exit *exec.ExitError
		if err := c.fairlead(c.server, append([]string{"explain"}, wrong...)...).Run(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
			c.t.Errorf("explain %q: %v, want exit code 2", wrong, err)
		}
	}
	out, err := process.Try(c.fairlead(c.server, "explain", "my-service", "--from", "nobody"))
	if err == nil || !strings.Contains(out+err.Error(), "--from is") {
		c.t.Errorf("an unknown client: %v, %s", err, out)
	}
}

// frontend is the first address and port of a Service.
func (c *cluster) frontend(service string) string {
	c.t.Helper()
	return strings.TrimSpace(c.kubectl("get", "service", service, "-o", "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}"))
}

// dial makes a connection from the node, and closes it.
func (c *cluster) dial(to string) (err error) {
	c.node.Do(func() {
		var conn net.Conn
		if conn, err = net.DialTimeout("tcp", to, 30*time.Second); err == nil {
			_ = conn.Close()
		}
	})
	return err
}

// counts connects to a Service, and to one without endpoints, and looks for both in the counts; a user who may edit a namespace does
// not see them.
func (c *cluster) counts() {
	c.t.Helper()
	const n = 5
	ask := func(service string) (p flows.Port) {
		c.t.Helper()
		var r struct{ Services []flows.Port }
		out := process.Output(c.t, c.fairlead(c.server, "top", "services", service, "-o", "json"))
		if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Services) > 1 {
			c.t.Fatalf("top services %s: %v: %s", service, err, out)
		}
		if len(r.Services) == 1 {
			p = r.Services[0]
		}
		return p
	}
	before, lost := ask("my-service"), ask("typo")
	at := c.frontend("my-service")
	for range n {
		if err := c.dial(at); err != nil {
			c.t.Fatalf("connect to my-service: %v", err)
		}
	}
	if err := c.dial(c.frontend("typo")); !testbed.Refused(err) {
		c.t.Errorf("a Service without endpoints: %v, want refused", err)
	}
	after := ask("my-service")
	sum := uint64(0)
	for _, e := range after.Endpoints {
		sum += e.Connections
	}
	if after.Connections < before.Connections+n || sum != after.Connections {
		c.t.Errorf("%d connections more: %+v, then %+v", n, before, after)
	}
	if p := ask("typo"); p.Refused <= lost.Refused || p.Connections != 0 {
		c.t.Errorf("a refused connection more: %+v, then %+v", lost, p)
	}
	metrics := process.Output(c.t, c.node.Command(c.t.Context(), "curl", "-sS", "--max-time", "30", "http://127.0.0.1:10249/metrics"))
	for _, e := range after.Endpoints {
		if !strings.Contains(metrics, `fairlead_service_endpoint_connections_total{endpoint="`+e.Address+`",namespace="default"`) {
			c.t.Errorf("no metric of endpoint %s", e.Address)
		}
	}
	c.kubectl("create", "rolebinding", "tenant-edits", "--clusterrole", "edit", "--user", "tenant")
	path := "/api/v1/nodes/" + c.node.Name() + "/proxy/services"
	if out := c.kubectl("get", "--raw", path); !strings.Contains(out, "my-service") {
		c.t.Errorf("an administrator sees %q", out)
	}
	if out, err := c.try("get", "--raw", path, "--as", "tenant"); err == nil || !strings.Contains(out+err.Error(), "forbidden") {
		c.t.Errorf("a user who may edit one namespace reads the counts of all: %q, %v", out, err)
	}
}

// plans shows what would change, by its exit code too: a Service of UDP that moves to another port cuts its flows, a new Service
// and a file that changes nothing do not.
func (c *cluster) plans() {
	c.t.Helper()
	const udp = `{apiVersion: v1, kind: Service, metadata: {name: udp}, spec: {selector: {app: MyApp}, ports: [{port: PORT, protocol: UDP}]}}`
	plan := func(manifest string, code int, want ...string) {
		c.t.Helper()
		file := c.path("plan.yaml")
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			c.t.Fatal(err)
		}
		cmd := c.fairlead(c.server, "plan", "-f", file)
		out, err := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != code {
			c.t.Errorf("exit code %d (%v), want %d:\n%s", got, err, code, out)
		}
		for _, w := range want {
			if !strings.Contains(string(out), w) {
				c.t.Errorf("no %q in\n%s", w, out)
			}
		}
	}
	first, second := strings.ReplaceAll(udp, "PORT", "53"), strings.ReplaceAll(udp, "PORT", "54")
	plan(first, 0, "Service default/udp: created", ":53 is added, sent to 2 endpoints", "DNS: udp.default.svc.cluster.local begins to resolve")
	if out, err := c.try("get", "service", "udp"); err == nil {
		c.t.Errorf("the plan has made the Service: %s", out)
	}
	c.apply(first)
	testbed.Until(c.t, "endpoints of the Service", func() error {
		out := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=udp", "-o", "jsonpath={.items[*].endpoints[*].addresses}")
		if len(strings.Fields(out)) != 2 {
			return errors.New(out)
		}
		return nil
	})
	c.kubectl("annotate", "service", "udp", "example.com/kept=yes") // an annotation of another author stays
	plan(first, 0, "Service default/udp: unchanged", "nothing changes for Services")
	plan(second, 2, ":53 is removed", "CUT: flows of UDP to it are forgotten", ":54 is added")
	plan(strings.Replace(first, "MyApp", "nobody", 1), 2, "loses its last endpoint", "CUT: flows of UDP")
	const web = "{apiVersion: v1, kind: Service, metadata: {name: my-service}, spec: "
	plan(web+"{selector: {app: nobody}, ports: [{port: 80, targetPort: 9376}]}}", 0, "loses its last endpoint: new connections are refused")
	plan(web+"{ports: [{port: 0}]}}", 1, "spec.ports[0].port")
}
