package node

import (
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	spans "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// received are the spans that a collector accepts, which is the receiver of the OpenTelemetry collector.
type received struct{ *process.Process }

// span is a span with the process that sent it.
type span struct {
	*spans.Span
	process string
	has     map[string]string
}

// all returns the spans that have come.
func (r received) all() (out []span, err error) {
	for line := range strings.Lines(r.Log()) {
		text, whole := strings.CutSuffix(line, "\n")
		if !whole || text == "ready" {
			continue
		}
		message, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("the collector says %s: %w", text, err)
		}
		var in collector.ExportTraceServiceRequest
		if err := proto.Unmarshal(message, &in); err != nil {
			return nil, err
		}
		for _, from := range in.ResourceSpans {
			process := attributes(from.Resource.Attributes)["service.name"]
			for _, scope := range from.ScopeSpans {
				for _, s := range scope.Spans {
					out = append(out, span{s, process, attributes(s.Attributes)})
				}
			}
		}
	}
	return out, nil
}

func attributes(list []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, a := range list {
		switch v := a.Value.Value.(type) {
		case *common.AnyValue_StringValue:
			out[a.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			out[a.Key] = fmt.Sprint(v.IntValue)
		case *common.AnyValue_BoolValue:
			out[a.Key] = fmt.Sprint(v.BoolValue)
		}
	}
	return out
}

// of returns the spans of one change: the root, and those below it by their names and nodes.
func (r received) of(kind, name, version string) (root *span, below map[string]span, err error) {
	all, err := r.all()
	if err != nil {
		return nil, nil, err
	}
	below = map[string]span{}
	for _, s := range all {
		if s.has["k8s.object.kind"] != kind || s.has["k8s.object.name"] != name || s.has["k8s.object.resource_version"] != version {
			continue
		}
		if len(s.ParentSpanId) == 0 {
			if root != nil {
				return nil, nil, fmt.Errorf("there are two roots of %s %s at version %s", kind, name, version)
			}
			root = &s
			continue
		}
		key := strings.TrimSpace(s.Name + " " + s.has["k8s.node.name"])
		if _, twice := below[key]; twice {
			return nil, nil, fmt.Errorf("there are two spans %s", key)
		}
		below[key] = s
	}
	if root == nil {
		return nil, nil, fmt.Errorf("no root of %s %s at version %s among %d spans", kind, name, version, len(all))
	}
	for key, s := range below {
		if string(s.TraceId) != string(root.TraceId) || string(s.ParentSpanId) != string(root.SpanId) {
			return nil, nil, fmt.Errorf("%s is not below the root: %v, %v", key, s.Span, root.Span)
		}
	}
	return root, below, nil
}

// One apply of a Service is one trace at a collector: its write at the API server, for each of two nodes the time from its
// arrival until the kernel has it, and the acknowledgement of all nodes. So are its change and its end. The collector is away at
// first, which is logged once and does not hold up anything.
func TestSpansOfAChange(t *testing.T) {
	t.Parallel()
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node")}
	other := network.Outside("other")
	at := netip.AddrPortFrom(c.server.Addr4(), 4317)
	flags := []string{"--otlp-endpoint", "http://" + at.String()}
	c.agentFlags = flags
	c.api = process.NewServer(c.server, process.Program("fairlead"), c.path("server"),
		append(flags, "--bind-address", "127.0.0.1,"+c.server.Addr4().String())...)
	c.api.Start(t)
	c.api.AwaitReady(t)
	for _, host := range []*testbed.Host{c.node, other} {
		host.Sysctl("net/ipv4/ip_forward", "1")
	}
	c.cleansUp(c.node, "agent")
	c.cleansUp(other, "other")
	c.startAgent()
	second := c.agentOn(other, "other")
	c.agentUp()
	second.Says("is up")
	c.nodesReady(2)
	address := c.backends()
	c.agent.Says("cannot send spans to http://" + at.String())

	to := received{process.Start(t, c.on(c.server, process.Build(t, "test/otlp", "."), at.String()))}
	to.Says("ready")

	manifest := strings.NewReplacer("name: my-service", "name: traced\n  annotations: {fairlead.dev/report-programmed: \"true\"}").Replace(
		mustRead(t, "../../examples/my-service.yaml"))
	apply := c.on(c.server, process.Program("kubectl"), "apply", "-f", "-", "-o", "jsonpath={.metadata.resourceVersion}")
	apply.Stdin = strings.NewReader(manifest)
	version := process.Output(t, apply)
	c.isTraced(to, "create Service", "traced", version, "acknowledge", "program node", "program other")
	version = c.kubectl("patch", "service", "traced", "-p", `{"spec":{"sessionAffinity":"ClientIP"}}`,
		"-o", "jsonpath={.metadata.resourceVersion}")
	c.isTraced(to, "update Service", "traced", version, "acknowledge", "program node", "program other")
	version = c.kubectl("annotate", "service", "my-service", "a=b", "-o", "jsonpath={.metadata.resourceVersion}")
	c.isTraced(to, "update Service", "my-service", version, "program node", "program other")
	if err := c.ask(address); err != nil {
		t.Error(err)
	}
	out := c.kubectl("patch", "service", "my-service", "-p", `{"metadata":{"annotations":{"a":"b"}}}`)
	if !strings.Contains(out, "no change") {
		t.Error(out)
	}
	c.acknowledgedBy(to, flags)
	c.kubectl("delete", "service", "traced")
	testbed.Until(t, "the spans of the deletion", func() error {
		all, err := to.all()
		if err != nil {
			return err
		}
		nodes := map[string]string{}
		for _, s := range all {
			if s.Name == "program" && s.has["fairlead.deleted"] == "true" && s.has["k8s.object.name"] == "traced" {
				nodes[s.has["k8s.node.name"]] = string(s.ParentSpanId)
			}
		}
		for _, s := range all {
			if s.Name == "delete Service" && len(nodes) == 2 && nodes["node"] == string(s.SpanId) && nodes["other"] == string(s.SpanId) {
				return nil
			}
		}
		return fmt.Errorf("%d nodes have removed it, or the root is missing", len(nodes))
	})
	root, _, err := to.of("Service", "my-service", version)
	if err != nil {
		t.Fatalf("after a patch that changes nothing: %v", err)
	}
	// docs/debugging.md
	id := process.Output(t, exec.Command("sh", "-c", "printf "+root.has["k8s.object.uid"]+"/"+version+" | sha256sum | cut -c1-32"))
	if want := hex.EncodeToString(root.TraceId); id != want {
		t.Errorf("the documented command finds the trace %q, want %s", id, want)
	}
	for name, log := range map[string]string{"server": c.api.Log(), "agent": c.agent.Log(), "other agent": second.Log()} {
		if n := strings.Count(log, "cannot send spans"); n > 1 {
			t.Errorf("the %s has logged %d times that it cannot send spans:\n%s", name, n, log)
		}
	}
}

// acknowledgedBy runs 'fairlead controllers' with some flags beside the server's controllers, and waits until it has sent the
// acknowledgement of a change.
func (c *cluster) acknowledgedBy(to received, flags []string) {
	c.t.Helper()
	p := process.Start(c.t, c.on(c.server, process.Program("fairlead"), append([]string{
		"controllers", "--controllers", "programmed", "--kubeconfig", c.path("server/admin.kubeconfig"), "--leader-elect=false",
		"--healthz-bind-address", "127.0.0.1:10299",
	}, flags...)...))
	defer p.Stop()
	version, changed, n := "", time.Time{}, 0
	testbed.Until(c.t, "an acknowledgement by fairlead controllers", func() error {
		if time.Since(changed) > 3*time.Second { // a change that it has not seen come has no acknowledgement
			changed, n = time.Now(), n+1
			version = c.kubectl("patch", "service", "traced", "-o", "jsonpath={.metadata.resourceVersion}", "-p",
				fmt.Sprintf(`{"spec": {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": %d}}}}`, 600+n))
		}
		all, err := to.all()
		for _, s := range all {
			if s.Name == "acknowledge" && s.process == "fairlead-controllers" && s.has["k8s.object.name"] == "traced" &&
				s.has["fairlead.nodes"] == "2" && len(s.ParentSpanId) > 0 {
				return nil
			}
		}
		return cmp.Or(err, fmt.Errorf("none until version %s", version))
	})
}

// isTraced waits for the spans of a write, and looks at their order.
func (c *cluster) isTraced(to received, what, name, version string, want ...string) {
	c.t.Helper()
	var root *span
	var below map[string]span
	testbed.Until(c.t, "the spans of version "+version, func() (err error) {
		root, below, err = to.of("Service", name, version)
		if err == nil && len(below) < len(want) {
			err = errors.New(strings.Join(slices.Sorted(maps.Keys(below)), ", "))
		}
		return err
	})
	if got := slices.Sorted(maps.Keys(below)); !slices.Equal(got, want) || root.Name != what || root.process != "fairlead-server" ||
		root.has["k8s.namespace.name"] != "default" || root.StartTimeUnixNano >= root.EndTimeUnixNano {
		c.t.Errorf("below %s of %s are %q: %v", root.Name, root.process, got, root.Span)
	}
	for key, s := range below {
		// All hosts of a testbed have one clock. Nodes may see a write a moment before its server knows that it is stored.
		if s.StartTimeUnixNano < root.StartTimeUnixNano || s.EndTimeUnixNano < s.StartTimeUnixNano {
			c.t.Errorf("%s is from %d to %d, below a write from %d to %d", key, s.StartTimeUnixNano, s.EndTimeUnixNano,
				root.StartTimeUnixNano, root.EndTimeUnixNano)
		}
		if ack, ok := below["acknowledge"]; ok && s.EndTimeUnixNano > ack.EndTimeUnixNano {
			c.t.Errorf("%s ends after the acknowledgement", key)
		}
	}
	if ack, ok := below["acknowledge"]; ok && ack.has["fairlead.nodes"] != "2" {
		c.t.Errorf("%s nodes have acknowledged it", ack.has["fairlead.nodes"])
	}
}
