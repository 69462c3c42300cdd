package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
	"github.com/fairlead/fairlead/internal/trace"
)

// firewall drops what Pods send to the Pods of my-service, as another program of the node; not the probes of the node itself.
const firewall = `
table inet firewalld {
	chain filter_FORWARD {
		type filter hook forward priority 10
		tcp dport 9376 drop comment "customer 4711"
	}
}`

// traces sends packets to Services, from a Pod and from the node, with and without a firewall of another program; then as users who
// may do less.
func (c *cluster) traces() {
	c.t.Helper()
	pods := strings.Fields(c.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].metadata.name}"))
	node := c.node.Name()
	r := c.trace("", pods[0], "my-service:80")
	if r.Result != explain.Answers || !slices.ContainsFunc(pods, func(p string) bool { return r.Pod == "default/"+p }) ||
		r.Service != "default/my-service" || r.Seen.Mode != "nft" || !strings.Contains(r.Decision.Text, r.Endpoint.String()) {
		c.t.Errorf("from a Pod: %+v, %+v", r, r.Seen)
	}
	for _, space := range []string{"Pod default/" + pods[0], "node " + node} {
		if !slices.ContainsFunc(r.Seen.Steps, func(s trace.Step) bool { return s.Space == space && s.Passed }) {
			c.t.Errorf("the packet was not seen in %s: %+v", space, r.Seen.Steps)
		}
	}
	if !slices.ContainsFunc(r.Seen.Steps, func(s trace.Step) bool { return s.Ours && s.Chain == "services" && s.Text != "" }) ||
		!slices.ContainsFunc(r.Elements, func(l explain.Line) bool { return l.Text == r.Endpoint.String() }) {
		c.t.Errorf("the rules and elements are not shown: %+v, %+v", r.Seen.Steps, r.Elements)
	}
	r = c.trace("", node, "typo")
	if r.Result != explain.Refused || !strings.Contains(r.Decision.Text, "fairlead rejects it in chain refuse") || len(r.Why) != 1 ||
		!strings.Contains(r.Why[0].Source, "spec.selector") {
		c.t.Errorf("without endpoints: %+v", r)
	}
	if r = c.trace("", node, "my-service.default.svc.cluster.local"); r.Result != explain.Answers {
		c.t.Errorf("by a name: %+v", r)
	}
	c.tracesHere()
	c.traceErrors(pods[0])
	c.traceRights(pods[0])
}

// trace runs fairlead trace, with a kubeconfig, or the administrator's.
func (c *cluster) trace(kubeconfig string, args ...string) *trace.Report {
	c.t.Helper()
	if kubeconfig == "" {
		kubeconfig = c.api.Kubeconfig
	}
	r := &trace.Report{}
	out := process.Output(c.t, c.withConfig(kubeconfig, append([]string{"trace", "-o", "json"}, args...)...))
	if err := json.Unmarshal([]byte(out), r); err != nil || r.Seen == nil {
		c.t.Fatalf("trace %q: %v: %s", args, err, out)
	}
	return r
}

// tracesHere traces on the node itself, without an API server, and with one that does not answer.
func (c *cluster) tracesHere() {
	c.t.Helper()
	dead := strings.ReplaceAll(mustRead(c.t, c.api.Kubeconfig), ":6443", ":1")
	file := c.path("dead.kubeconfig")
	if err := os.WriteFile(file, []byte(dead), 0o600); err != nil {
		c.t.Fatal(err)
	}
	for _, kubeconfig := range []string{c.path("none"), file} {
		cmd := c.on(c.node, process.Program("fairlead"), "trace", c.frontend("typo"), "-o", "json")
		cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
		r := &trace.Report{}
		out := process.Output(c.t, cmd)
		if err := json.Unmarshal([]byte(out), r); err != nil || r.Result != explain.Refused || len(r.Notes) != 1 ||
			!strings.Contains(r.Decision.Text, "fairlead rejects it in chain refuse") {
			c.t.Errorf("on the node itself: %v: %s", err, out)
		}
	}
}

// traceErrors asks what cannot be answered.
func (c *cluster) traceErrors(pod string) {
	c.t.Helper()
	for _, wrong := range [][]string{
		{"node", "http://shop/"}, {"http://"}, {"http://shop/", "-H", "x"}, {"http://shop/", "--address", "shop"}, {"my-service", "-k"},
		{}, {"a", "b", "c"}, {"", "typo"}, {"10.244.0.1", "typo"}, {pod, "10.96.0.1"}, {pod, "typo:"}, {pod, "typo:81"}, {pod, "typo:http"},
		{pod, "typo", "--protocol", "sctp"}, {pod, "typo", "--protocol", "udp"},
	} {
		var exit *exec.ExitError
		if err := c.fairlead(c.server, append([]string{"trace"}, wrong...)...).Run(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
			c.t.Errorf("trace %q: %v, want exit code 2", wrong, err)
		}
	}
	for _, missing := range [][]string{{"nobody", "typo"}, {pod, "nothing"}, {pod, "a.b.svc.cluster.local"}} {
		if out, err := process.Try(c.fairlead(c.server, append([]string{"trace"}, missing...)...)); err == nil {
			c.t.Errorf("trace %q: %s", missing, out)
		}
	}
	at := "/api/v1/namespaces/default/pods/" + pod + "/trace?"
	for _, query := range []string{
		"", "address=10.96.0.1", "address=10.96.0.1:0", "address=224.0.0.1:80", "address=255.255.255.255:80", "address=0.0.0.0:80",
		"address=[fe80::1%25eth0]:80", "address=10.96.0.1:80&protocol=SCTP", "address=10.96.0.1:80&protocol=icmp",
	} {
		if out, err := c.post(at+query, "admin"); err == nil || !strings.Contains(out+err.Error(), "(BadRequest)") {
			c.t.Errorf("query %q: %v: %s", query, err, out)
		}
	}
}

// post sends a POST request without a body, as a user.
func (c *cluster) post(path, user string) (string, error) {
	c.t.Helper()
	as := []string{}
	if user != "admin" {
		as = []string{"--as", user}
	}
	return c.try(append([]string{"create", "--raw", path, "-f", os.DevNull}, as...)...)
}

// traceRights traces as a user with the role edit in a namespace, beside a firewall, and as users who may not.
func (c *cluster) traceRights(pod string) {
	c.t.Helper()
	nft := c.node.Command(c.t.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(firewall)
	process.Output(c.t, nft)
	kubeconfig := c.tenantConfig()
	for who, r := range map[string]*trace.Report{
		"administrator": c.trace("", pod, "my-service"), "tenant": c.trace(kubeconfig, pod, "my-service"),
	} {
		secret := strings.Contains(r.Decision.Text, "customer 4711")
		if r.Result != explain.Dropped || !strings.Contains(r.Decision.Source, "table inet firewalld chain filter_FORWARD") ||
			secret != (who == "administrator") || (r.Seen.Facts != nil) != (who == "administrator") {
			c.t.Errorf("%s, beside a firewall: %+v, %+v", who, r, r.Seen)
		}
	}
	process.Output(c.t, c.node.Command(c.t.Context(), "nft", "delete table inet firewalld"))
	if r := c.trace(kubeconfig, pod, "my-service"); r.Result != explain.Answers {
		c.t.Errorf("a tenant, without a firewall: %+v", r)
	}
	c.kubectl("create", "rolebinding", "viewer-views", "--clusterrole", "view", "--user", "viewer")
	const to = "/trace?address=10.96.0.1:443"
	for _, q := range []struct{ user, path string }{
		{"tenant", "/api/v1/nodes/" + c.node.Name() + "/proxy" + to},
		{"tenant", "/api/v1/nodes/" + c.node.Name() + "/proxy/trace/default/" + pod + "?address=10.96.0.1:443"},
		{"tenant", "/api/v1/namespaces/kube-system/pods/any" + to},
		{"viewer", "/api/v1/namespaces/default/pods/" + pod + to},
	} {
		if out, err := c.post(q.path, q.user); err == nil || !strings.Contains(out+err.Error(), "forbidden") {
			c.t.Errorf("%s may post to %s: %v: %s", q.user, q.path, err, out)
		}
	}
	out, err := process.Try(c.withConfig(kubeconfig, "trace", c.node.Name(), "my-service"))
	if err == nil {
		c.t.Errorf("a tenant traces from a node: %s", out)
	}
	if tables := process.Output(c.t, c.node.Command(c.t.Context(), "nft", "list tables")); strings.Contains(tables, "fairlead-trace") {
		c.t.Errorf("left behind:\n%s", tables)
	}
}

// withConfig is fairlead with the kubeconfig of another user.
func (c *cluster) withConfig(kubeconfig string, args ...string) *exec.Cmd {
	cmd := c.fairlead(c.server, args...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
	return cmd
}

// tenantConfig is the kubeconfig of a user who may edit the namespace default.
func (c *cluster) tenantConfig() string {
	c.t.Helper()
	c.kubectl("create", "serviceaccount", "tracer")
	c.kubectl("create", "rolebinding", "tracer-edits", "--clusterrole", "edit", "--serviceaccount", "default:tracer")
	cfg, err := clientcmd.LoadFromFile(c.api.Kubeconfig)
	if err != nil {
		c.t.Fatal(err)
	}
	for name := range cfg.AuthInfos {
		cfg.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: strings.TrimSpace(c.kubectl("create", "token", "tracer"))}
	}
	file := c.path("tracer.kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, file); err != nil {
		c.t.Fatal(err)
	}
	testbed.Until(c.t, "the rights of the tenant", func() error {
		if out, err := c.try("auth", "can-i", "create", "pods/trace", "--as", "system:serviceaccount:default:tracer"); err != nil {
			return fmt.Errorf("%s: %w", out, err)
		}
		return nil
	})
	return file
}
