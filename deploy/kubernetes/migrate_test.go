package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// peer is a program that 'make kube-proxy' builds: kube-proxy v1.37.2, or CoreDNS. It is named by FAIRLEAD_KUBE_PROXY or
// FAIRLEAD_COREDNS, or in bench/bin. Without it the test is skipped.
func peer(t *testing.T, name string) string {
	t.Helper()
	variable := "FAIRLEAD_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
	for _, program := range []string{os.Getenv(variable), filepath.Join("../../bench/bin", name)} {
		if _, err := os.Stat(program); err == nil {
			if absolute, err := filepath.Abs(program); err == nil {
				return absolute
			}
		}
	}
	if process.Kubernetes() {
		t.Fatalf("no %s in bench/bin", name) // 'make kubernetes-test' builds it
	}
	t.Skipf("no %s in bench/bin ('make migrate-test' builds it and runs this test) and none named by %s", name, variable)
	return ""
}

// kubeconfigOfPods is what kube-proxy and CoreDNS read in their ConfigMaps: the API server by the Pod's own token.
const kubeconfigOfPods = `    apiVersion: v1
    kind: Config
    clusters:
    - {name: default, cluster: {certificate-authority: ` + serviceAccountDir + `/ca.crt, server: SERVER, tls-server-name: example.com}}
    contexts: [{name: default, context: {cluster: default, namespace: default, user: default}}]
    current-context: default
    users: [{name: default, user: {tokenFile: ` + serviceAccountDir + `/token}}]`

// kubeProxyObjects are kubeadm's for kube-proxy, with settings of the mode.
const kubeProxyObjects = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kubeadm:node-proxier}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system}
data:
  config.conf: |-
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}
    clusterCIDR: PODS
    mode: MODE
    conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
  kubeconfig.conf: |-
` + kubeconfigOfPods + `
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}, annotations: {mode: MODE}}
    spec:
      containers:
      - name: kube-proxy
        image: registry.k8s.io/kube-proxy:v1.37.2
        command: [/usr/local/bin/kube-proxy, --config=/var/lib/kube-proxy/config.conf, --hostname-override=$(NODE_NAME)]
        env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        securityContext: {privileged: true}
        volumeMounts:
        - {mountPath: /var/lib/kube-proxy, name: kube-proxy}
        - {mountPath: /run/xtables.lock, name: xtables-lock}
        - {mountPath: /lib/modules, name: lib-modules, readOnly: true}
      hostNetwork: true
      nodeSelector: {kubernetes.io/os: linux}
      priorityClassName: system-node-critical
      serviceAccountName: kube-proxy
      tolerations: [{operator: Exists}]
      volumes:
      - {name: kube-proxy, configMap: {name: kube-proxy}}
      - {name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
      - {name: lib-modules, hostPath: {path: /lib/modules}}
  updateStrategy: {type: RollingUpdate}
`

// migration is a rig with kube-proxy, two endpoints of a Service with addresses of both families, and clients.
type migration struct {
	*rig
	pod, outside *testbed.Host
	inside, port map[svc.Family]netip.AddrPort // the Service's address, and its node port
	kept         map[string]*testbed.Host
	sticky       map[svc.Family]netip.AddrPort // the address of a Service with the same endpoints and session affinity
}

var families = []svc.Family{svc.IPv4, svc.IPv6}

func newMigration(t *testing.T) *migration {
	t.Helper()
	kubeProxy, coreDNS := peer(t, "kube-proxy"), peer(t, "coredns")
	n := testbed.NewNetwork(t)
	m := &migration{kept: map[string]*testbed.Host{}, rig: &rig{T: t, node: n.Host("node1")}, outside: n.Outside("outside")}
	m.connect()
	fairlead := process.Program("fairlead")
	m.api.RunWorkloads(t)
	startKubelet(m.rig, map[string]string{
		"registry.k8s.io/kube-proxy:v1.37.2": kubeProxy, "fairlead/fairlead:0.1.0": fairlead, corednsImage: coreDNS,
		placeholderImage: "/usr/bin/sleep",
	})
	m.register(m.node, m.node.Addr6())
	m.serve()
	return m
}

// serve makes the Services and their endpoints.
func (m *migration) serve() {
	m.Helper()
	port := int32(8080)
	var endpoints []*testbed.Host
	for _, name := range []string{"a", "b"} {
		pod := m.node.Pod(name)
		pod.Serve(svc.TCP, uint16(port))
		endpoints = append(endpoints, pod)
	}
	m.pod = m.node.Pod("client")
	m.inside, m.port, m.sticky = map[svc.Family]netip.AddrPort{}, map[svc.Family]netip.AddrPort{}, map[svc.Family]netip.AddrPort{}
	for name, spec := range map[string]corev1.ServiceSpec{
		"web": {Type: corev1.ServiceTypeNodePort}, "sticky": {SessionAffinity: corev1.ServiceAffinityClientIP},
	} {
		spec.Ports, spec.IPFamilyPolicy = []corev1.ServicePort{{Port: 80}}, new(corev1.IPFamilyPolicyPreferDualStack)
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
		s, err := m.client.CoreV1().Services("default").Create(m.Context(), s, metav1.CreateOptions{})
		if err != nil {
			m.Fatal(err)
		}
		for _, ip := range s.Spec.ClusterIPs {
			at := netip.AddrPortFrom(netip.MustParseAddr(ip), 80)
			family := svc.FamilyOf(at.Addr())
			if name == "sticky" {
				m.sticky[family] = at
			} else {
				m.inside[family], m.port[family] = at, netip.AddrPortFrom(m.node.Addr(family), uint16(s.Spec.Ports[0].NodePort))
			}
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{GenerateName: name + "-", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
				AddressType: discoveryv1.AddressType(family.String()),
				Ports:       []discoveryv1.EndpointPort{{Port: &port, Protocol: new(corev1.ProtocolTCP), Name: new("")}},
			}
			for _, pod := range endpoints {
				slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{pod.Addr(family).String()}, NodeName: new("node1"),
					Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
				})
			}
			if _, err := m.client.DiscoveryV1().EndpointSlices("default").Create(m.Context(), slice, metav1.CreateOptions{}); err != nil {
				m.Fatal(err)
			}
		}
	}
	if len(m.inside) != 2 || len(m.sticky) != 2 {
		m.Fatalf("the Services have the addresses %v and %v", m.inside, m.sticky)
	}
}

// endpoints returns who answers each of the clients of the Service with session affinity, which are new at the first call.
func (m *migration) endpoints() map[string]string {
	m.Helper()
	out := map[string]string{}
	for i := range 6 {
		name := fmt.Sprintf("kept%d", i)
		if m.kept[name] == nil {
			m.kept[name] = m.node.Pod(name)
		}
		for _, family := range families {
			testbed.Until(m.T, "an answer of the Service with session affinity", func() error {
				ctx, cancel := context.WithTimeout(m.Context(), 2*time.Second)
				defer cancel()
				answer, err := m.kept[name].Ask(ctx, svc.TCP, m.sticky[family])
				out[name+" "+family.String()] = answer.Name
				return err
			})
		}
	}
	return out
}

// kubeProxy starts kube-proxy in a mode, and waits until the Service answers through it.
func (m *migration) kubeProxy(mode string) {
	m.Helper()
	pods := m.node.PodCIDR(svc.IPv4).String() + "," + m.node.PodCIDR(svc.IPv6).String()
	text := strings.NewReplacer("MODE", mode, "PODS", `"`+pods+`"`, "SERVER", m.gateway.URL).Replace(kubeProxyObjects)
	m.apply(text)
	m.kubectl("rollout", "status", "daemonset/kube-proxy", "-n", "kube-system", "--timeout=2m")
	testbed.Until(m.T, "the rules of kube-proxy in mode "+mode, func() error {
		ctx, cancel := context.WithTimeout(m.Context(), 2*time.Second)
		defer cancel()
		for family, save := range saves {
			chains := process.Output(m.T, m.node.Command(m.Context(), save))
			if strings.Contains(chains, "KUBE-SEP-") != (mode == "iptables") {
				return fmt.Errorf("it has rules of another mode for %s", family)
			}
			_, err1 := m.pod.Ask(ctx, svc.TCP, m.inside[family])
			_, err2 := m.outside.Ask(ctx, svc.TCP, m.port[family])
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
		}
		return nil
	})
}

// saves are the programs that print the rules of a family.
var saves = map[svc.Family]string{svc.IPv4: "iptables-save", svc.IPv6: "ip6tables-save"}

// migrate runs 'fairlead migrate'.
func (m *migration) migrate(args ...string) (string, error) {
	args = append([]string{"migrate", args[0], "--kubeconfig", m.api.Kubeconfig}, args[1:]...)
	return process.Try(exec.Command(process.Program("fairlead"), args...))
}

// phase returns the label of the node.
func (m *migration) phase() string {
	m.Helper()
	return m.kubectl("get", "node", "node1", "-o", `jsonpath={.metadata.labels.fairlead\.dev/proxy}`)
}

// traffic opens connections all the time, from a Pod to the Service's address and from outside to its node port, over both families,
// and keeps one of each open, until the test calls the function that it returns.
func (m *migration) traffic() (end func()) {
	m.Helper()
	all := repeat(m.T)
	var made, failed atomic.Int64
	var kept []net.Conn
	for _, way := range []struct {
		from *testbed.Host
		to   netip.AddrPort
		seen netip.Addr // by the endpoint; a node port hides the client behind the node, on the Pods' bridge
	}{
		{m.pod, m.inside[svc.IPv4], m.pod.Addr4()}, {m.outside, m.port[svc.IPv4], netip.Addr{}},
		{m.pod, m.inside[svc.IPv6], m.pod.Addr6()}, {m.outside, m.port[svc.IPv6], netip.Addr{}},
	} {
		first, err := m.keep(way.from, way.to)
		if err != nil {
			m.Fatal(err)
		}
		kept = append(kept, first)
		all.every(10*time.Millisecond, func() {
			a, err := way.from.Ask(context.Background(), svc.TCP, way.to)
			if !way.seen.IsValid() && err == nil {
				way.seen = a.Client.Addr()
			}
			if err != nil || a.Client.Addr() != way.seen {
				if failed.Add(1) < 5 {
					m.Errorf("from %s to %s: %v, client %s, want %s", way.from.Name(), way.to, err, a.Client, way.seen)
				}
			}
			made.Add(1)
		})
	}
	return func() {
		m.Helper()
		all.end()
		if made.Load() < 100 {
			m.Errorf("only %d connections were made", made.Load())
		}
		m.Logf("%d of %d new connections failed", failed.Load(), made.Load())
		for _, c := range kept {
			_ = c.SetDeadline(time.Now().Add(testbed.Patience))
			reply := make([]byte, 6)
			if _, err := c.Write([]byte("there?")); err != nil {
				m.Errorf("a kept connection: %v", err)
			} else if _, err := c.Read(reply); err != nil || string(reply) != "there?" {
				m.Errorf("a kept connection answers %q, %v", reply, err)
			}
			_ = c.Close()
		}
	}
}

// repeated are functions that are called again and again.
type repeated struct {
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// repeat returns a repeated that ends with the test at the latest.
func repeat(t *testing.T) *repeated {
	r := &repeated{}
	r.ctx, r.stop = context.WithCancel(context.Background())
	t.Cleanup(r.end)
	return r
}

// every calls do in the background, once in a time at most, until the end.
func (r *repeated) every(pace time.Duration, do func()) {
	r.wg.Go(func() {
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for r.ctx.Err() == nil {
			do()
			<-tick.C
		}
	})
}

// end waits until no function runs any more.
func (r *repeated) end() {
	r.stop()
	r.wg.Wait()
}

// keep opens a connection without a deadline.
func (m *migration) keep(from *testbed.Host, to netip.AddrPort) (net.Conn, error) {
	c, err := from.Dial(m.Context(), svc.TCP, to)
	if err != nil {
		return nil, err
	}
	_, err = testbed.AskOn(c)
	return c, errors.Join(err, c.SetDeadline(time.Time{}))
}

// rules reports which programs' rules are in the node's kernel.
func (m *migration) rules() string {
	m.Helper()
	var out []string
	tables := process.Output(m.T, m.node.Command(m.Context(), "nft", "list", "tables"))
	its := map[bool]int{}
	for family, save := range saves {
		chains := process.Output(m.T, m.node.Command(m.Context(), save))
		word := map[svc.Family]string{svc.IPv4: "ip", svc.IPv6: "ip6"}[family]
		its[strings.Contains(tables, "table "+word+" kube-proxy") || strings.Contains(chains, "KUBE-SERVICES")]++
	}
	switch {
	case its[true] == len(saves):
		out = append(out, "kube-proxy")
	case its[true] > 0:
		out = append(out, "kube-proxy for one family")
	}
	if strings.Contains(tables, "fairlead") {
		out = append(out, "fairlead")
	}
	return strings.Join(out, " ")
}

// must runs a command that has to succeed, and returns what it printed.
func (m *migration) must(args ...string) string {
	m.Helper()
	out, err := m.migrate(args...)
	if err != nil {
		m.Fatalf("fairlead migrate %v: %v\n%s", args, err, out)
	}
	return out
}

// template is kube-proxy's Pod template.
func (m *migration) template() string {
	m.Helper()
	d, err := m.client.AppsV1().DaemonSets("kube-system").Get(m.Context(), "kube-proxy", metav1.GetOptions{})
	if err != nil {
		m.Fatal(err)
	}
	text, err := json.Marshal(d.Spec.Template)
	if err != nil {
		m.Fatal(err)
	}
	return string(text)
}

// A node goes from the real kube-proxy to fairlead proxy and back with the commands of docs/kubernetes.md, in both modes. No new
// connection of either family fails, clients keep their address, open connections go on, and each program's rules are gone with it.
func TestMigrate(t *testing.T) {
	m := newMigration(t)
	commands := migrateCommands(t, "kube-proxy, node by node")
	for _, mode := range []string{"nftables", "iptables"} {
		m.kubeProxy(mode)
		before := m.template()
		kept := m.endpoints()
		end := m.traffic()
		for _, command := range commands {
			if mode == "nftables" && command == "apply" {
				m.interrupted()
			}
			out := m.must(strings.Fields(command)...)
			switch command {
			case "plan":
				if !strings.Contains(out, "mode "+mode) || !strings.Contains(out, "node1: kube-proxy -> fairlead") {
					t.Errorf("the plan is\n%s", out)
				}
			case "apply":
				if m.phase() != "fairlead" || m.rules() != "fairlead" {
					t.Errorf("applied: phase %q, rules of %s\n%s", m.phase(), m.rules(), out)
				}
				if now := m.endpoints(); !maps.Equal(now, kept) {
					t.Errorf("applied: clients with session affinity are at %v, were at %v", now, kept)
				}
			case "verify", "status":
				if !strings.Contains(out, "node1") || !strings.Contains(out, "fairlead") {
					t.Errorf("%s: %s", command, out)
				}
			case "rollback":
				if m.phase() != "" || m.rules() != "kube-proxy" {
					t.Errorf("rolled back: phase %q, rules of %s\n%s", m.phase(), m.rules(), out)
				}
				if now := m.endpoints(); !maps.Equal(now, kept) {
					t.Errorf("rolled back: clients with session affinity are at %v, were at %v", now, kept)
				}
			}
		}
		if after := m.template(); after != before {
			t.Errorf("the template of kube-proxy is\n%s\nand was\n%s", after, before)
		}
		if mode == "iptables" {
			m.broken()
		}
		end()
	}
	m.nodeLocal(m.dns())
	m.metallb()
	left := m.kubectl("get", "daemonsets,deployments,serviceaccounts,clusterroles,clusterrolebindings", "-A", "-o", "name")
	if strings.Contains(left, "fairlead-proxy") || strings.Contains(left, "fairlead-dns") {
		t.Errorf("left of fairlead: %s", left)
	}
	// The proxy asks whether it may report what it has programmed. Here no controller waits for that, and so nothing gives the right.
	m.checkRights("GET /apis/coordination.k8s.io/v1/namespaces/kube-system/leases: 403 Forbidden")
}

// interrupted kills 'apply' as soon as the node has left its first phase; the next 'apply' goes on.
func (m *migration) interrupted() {
	m.Helper()
	p := process.Start(m.T, exec.Command(process.Program("fairlead"), "migrate", "apply", "--kubeconfig", m.api.Kubeconfig))
	testbed.Until(m.T, "the first phase", func() error {
		if m.phase() == "" {
			return errors.New("the node has no label")
		}
		return nil
	})
	p.Kill()
}

// broken applies an image that does not start, and a second program that changes the node: both stop, name the ways on, and hurt
// nothing. The way back works from there.
func (m *migration) broken() {
	m.Helper()
	out, err := m.migrate("apply", "--image", "no/such:image", "--timeout", "10s")
	if err == nil || !strings.Contains(err.Error()+out, "ErrImagePull") || !strings.Contains(err.Error()+out, "fairlead migrate rollback") {
		m.Errorf("with an image that is not there: %v\n%s", err, out)
	}
	if status := m.must("status"); !strings.Contains(status, "beside") || !strings.Contains(status, "ErrImagePull") {
		m.Errorf("after the failure: %s", status)
	}
	if m.rules() != "kube-proxy" {
		m.Errorf("after the failure there are rules of %s", m.rules())
	}
	m.kubectl("label", "node", "node1", "--overwrite", "fairlead.dev/proxy=faihlead")
	if out, err := m.migrate("apply"); err == nil || !strings.Contains(err.Error()+out, `"faihlead"; want none, or one of beside`) {
		m.Errorf("with a mistake in the label: %v\n%s", err, out)
	}
	m.kubectl("label", "node", "node1", "--overwrite", "fairlead.dev/proxy=beside")
	m.must("rollback", "--image", "fairlead/fairlead:0.1.0")
}

// section returns a section of a document.
func section(t *testing.T, document, title string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + document)
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "\n## "+title+"\n")
	if !ok {
		t.Fatalf("docs/%s has no section %q", document, title)
	}
	after, _, _ = strings.Cut(after, "\n## ")
	return after
}

// placeholderImage is in the place of images whose programs are not run here. The Pods are there for the commands that stop them
// and wait for their end.
const placeholderImage = "quay.io/metallb/placeholder"

// placeholder is a Deployment or a DaemonSet of placeholderImage. spec has more of the Pods' spec.
func placeholder(kind, namespace, name, labels, spec string) string {
	return strings.NewReplacer("KIND", kind, "NAMESPACE", namespace, "NAME", name, "LABELS", labels, "SPEC", spec).Replace(`
apiVersion: apps/v1
kind: KIND
metadata: {name: NAME, namespace: NAMESPACE, labels: {LABELS}}
spec:
  selector: {matchLabels: {LABELS}}
  template:
    metadata: {labels: {LABELS}}
    spec: {SPEC, containers: [{name: NAME, image: ` + placeholderImage + `, args: [infinity]}]}
`)
}

// migrateCommands returns the commands of a section of docs/kubernetes.md, without the program and the kubeconfig.
func migrateCommands(t *testing.T, title string) (out []string) {
	t.Helper()
	text := section(t, "kubernetes.md", title)
	for _, c := range regexp.MustCompile(`(?m)^ +(?:\$ )?fairlead migrate ([^#\n]+)`).FindAllStringSubmatch(text, -1) {
		out = append(out, strings.TrimSpace(c[1]))
	}
	if len(out) < 5 {
		t.Fatalf("only the commands %q", out)
	}
	return out
}
