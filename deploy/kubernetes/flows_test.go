package kubernetes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/hubble/tunnel"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// flowSteps are the commands of docs/hubble.md for a Kubernetes cluster.
func flowSteps(t *testing.T) []string {
	t.Helper()
	steps := blocks(section(t, "hubble.md", "On Kubernetes"))
	if len(steps) != 4 {
		t.Fatalf("the section has the commands %q", steps)
	}
	return steps
}

// wantFlows lets the proxies record flows, as the document says.
func (d *drains) wantFlows() {
	d.Helper()
	steps := flowSteps(d.T)
	patch, _, _ := strings.Cut(steps[1], "kubectl -n kube-system rollout") // for which no controller works
	d.shell(steps[0], patch)
}

// checkFlows runs the relay, and asks it by the hubble command for the flows of both nodes.
func (d *drains) checkFlows(served *server) {
	d.Helper()
	program := process.Build(d.T, "test/hubble", "github.com/cilium/cilium/hubble")
	relay, err := d.client.AppsV1().Deployments("kube-system").Get(d.Context(), "fairlead-hubble-relay", metav1.GetOptions{})
	if err != nil {
		d.Fatal(err)
	}
	none := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "none"}}
	none.Spec = corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}}}
	if none, err = d.client.CoreV1().Services("default").Create(d.Context(), none, metav1.CreateOptions{}); err != nil {
		d.Fatal(err)
	}
	p := d.run(d.node, relay.Spec.Template)
	ask := func(args ...string) (string, error) {
		cmd := d.node.Command(d.Context(), program, append(args, "--server", "127.0.0.1:4245")...)
		cmd.Env = []string{"HOME=" + d.TempDir()}
		return process.Try(cmd)
	}
	refused := netip.AddrPortFrom(netip.MustParseAddr(none.Spec.ClusterIP), 80)
	for _, q := range []struct{ ask, want string }{
		{"status", `Connected Nodes: 2/2`},
		{"list nodes", `node1 +Connected .*\nnode2 +Connected `},
		{"observe --service web --node-name default/node1", `-> default/` + served.Name[:4] + `\S+:9376 .* FORWARDED`},
		{"observe --service web --node-name default/node2 --to-label app=web", `-> default/` + served.Name[:4] + `\S+:9376 .* FORWARDED`},
		{"observe --service none --verdict DROPPED", `Service backend not found DROPPED .Service default/none has no endpoint`},
		{"list namespaces", `default`},
	} {
		testbed.Until(d.T, "hubble "+q.ask, func() error {
			// A flow within a second after its Service was programmed may be without it.
			for _, host := range []*testbed.Host{d.node, d.node2} {
				if err := get(host, d.service); err != nil {
					return err
				}
			}
			if c, err := d.node.Dial(d.Context(), svc.TCP, refused); err == nil {
				_ = c.Close()
				return errors.New("a Service without endpoints has answered")
			}
			out, err := ask(strings.Fields(q.ask)...)
			if err != nil || !regexp.MustCompile(q.want).MatchString(out) {
				return fmt.Errorf("%v: it printed\n%s\nwant %s; the relay logged\n%s", err, out, q.want, p.Log())
			}
			return nil
		})
	}
	d.checkRelay()
	p.Stop()
	d.run(d.node, relay.Spec.Template) // with another certificate
	testbed.Until(d.T, "both nodes are connected again", func() error {
		if out, err := ask("status"); err != nil || !strings.Contains(out, "Connected Nodes: 2/2") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
}

// checkRelay connects as others than a proxy of a node: the API server's review decides.
func (d *drains) checkRelay() {
	d.Helper()
	config, err := d.client.CoreV1().ConfigMaps("kube-system").Get(d.Context(), tunnel.ConfigMap, metav1.GetOptions{})
	if err != nil {
		d.Fatal(err)
	}
	where := config.Data["address"]
	host, _, err := net.SplitHostPort(where)
	if err != nil || host != d.node.Addr4().String() {
		d.Errorf("the relay is at %q: %v", where, err)
	}
	unbound, err := d.client.CoreV1().ServiceAccounts("kube-system").CreateToken(d.Context(), "fairlead-proxy",
		&authv1.TokenRequest{Spec: authv1.TokenRequestSpec{Audiences: []string{tunnel.Audience}}}, metav1.CreateOptions{})
	if err != nil {
		d.Fatal(err)
	}
	for token, want := range map[string]string{
		d.token("fairlead-proxy", "node1", ""):              "does not accept the token",
		d.token("fairlead-drain", "node1", tunnel.Audience): "the token is that of system:serviceaccount:kube-system:fairlead-drain",
		unbound.Status.Token:                                "the token names no node",
		"":                                                  "the request has no token",
	} {
		out, err := process.Try(d.node2.Command(d.Context(), "curl", "-sk", "--http1.1", "-m", "30", "-H", "Connection: Upgrade",
			"-H", "Upgrade: fairlead-flows", "-H", "Authorization: Bearer "+token, "https://"+where+"/hubble/"))
		if err != nil || !strings.Contains(out, want) {
			d.Errorf("want %s: %v, %s", want, err, out)
		}
	}
	// Nobody on the network reaches the port of users.
	out, err := process.Try(d.node2.Command(d.Context(), "curl", "-s", "-m", "10", "http://"+host+":4245/"))
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 { // cannot connect
		d.Errorf("the port of users: %v, %s", err, out)
	}
}
