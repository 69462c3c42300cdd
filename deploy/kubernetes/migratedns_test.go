package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

const corednsImage = "registry.k8s.io/coredns/coredns:v1.15.0"

// corednsObjects are kubeadm's for CoreDNS, with a kubeconfig in the place of the address of the cluster's API server.
const corednsObjects = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: system:coredns}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: system:coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:coredns}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  selector: {k8s-app: kube-dns}
  clusterIP: 10.96.0.10
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}, {name: metrics, port: 9153}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
COREFILE
  kubeconfig: |-
` + kubeconfigOfPods + `
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  replicas: 2
  strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      tolerations: [{key: CriticalAddonsOnly, operator: Exists}]
      nodeSelector: {kubernetes.io/os: linux}
      dnsPolicy: Default
      containers:
      - name: coredns
        image: ` + corednsImage + `
        args: [-conf, /etc/coredns/Corefile]
        volumeMounts: [{name: config-volume, mountPath: /etc/coredns, readOnly: true}]
        ports:
        - {containerPort: 53, name: dns, protocol: UDP}
        - {containerPort: 53, name: dns-tcp, protocol: TCP}
        - {containerPort: 9153, name: metrics, protocol: TCP}
        readinessProbe: {httpGet: {path: /ready, port: 8181}}
      volumes: [{name: config-volume, configMap: {name: coredns}}]
`

// startCoreDNS starts CoreDNS and waits until the Service's address answers. It returns the address.
func (m *migration) startCoreDNS() netip.AddrPort {
	m.Helper()
	corefile, err := os.ReadFile("../../internal/corefile/testdata/kubeadm.Corefile")
	if err != nil {
		m.Fatal(err)
	}
	// The network has no upstream. No question must depend on the time for which a server that ends still answers.
	text := strings.NewReplacer("lameduck 5s", "lameduck 1s", "pods insecure", "pods insecure\n       kubeconfig /etc/coredns/kubeconfig",
		"/etc/resolv.conf", "192.0.2.1", "    loop\n", "").Replace(string(corefile))
	text = "    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ")
	text = strings.NewReplacer("COREFILE", text, "SERVER", m.gateway.URL).Replace(corednsObjects)
	m.apply(text)
	m.kubectl("rollout", "status", "deployment/coredns", "-n", "kube-system", "--timeout=2m")
	address := netip.AddrPortFrom(netip.MustParseAddr(
		m.kubectl("get", "service", "kube-dns", "-n", "kube-system", "-o", "jsonpath={.spec.clusterIP}")), 53)
	testbed.Until(m.T, "an answer of CoreDNS", func() error { return m.question(svc.UDP, address, 2*time.Second) })
	return address
}

// question asks for the address of the Service web, over a new socket.
func (m *migration) question(p svc.Protocol, server netip.AddrPort, within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	c, err := m.pod.Dial(ctx, p, server)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	conn := &dns.Conn{Conn: c}
	if err := conn.WriteMsg(new(dns.Msg).SetQuestion("web.default.svc.cluster.local.", dns.TypeA)); err != nil {
		return err
	}
	answer, err := conn.ReadMsg()
	if err != nil {
		return err
	}
	if len(answer.Answer) == 1 {
		if a, ok := answer.Answer[0].(*dns.A); ok && a.A.String() == m.inside[svc.IPv4].Addr().String() {
			return nil
		}
	}
	return fmt.Errorf("the answer is %v", answer)
}

// maxAgain bounds the questions that are asked again on the way to fairlead dns and back: a change of kube-proxy's rules forgets the
// one that each client has under way.
const maxAgain = 10

// asking are clients that ask a server all the time.
type asking struct {
	*repeated
	m                  *migration
	asked, again, lost atomic.Int64
}

// questions asks all the time, over UDP and TCP, with a number of clients for each, until the test calls end. As resolvers do, it asks a
// second time where no answer comes. None may be lost.
func (m *migration) questions(server netip.AddrPort, clients int) *asking {
	a := &asking{repeated: repeat(m.T), m: m}
	for p, pace := range map[svc.Protocol]time.Duration{svc.UDP: 2 * time.Millisecond, svc.TCP: 10 * time.Millisecond} {
		for range clients {
			a.every(pace, func() {
				a.asked.Add(1)
				if err := m.question(p, server, 5*time.Second); err != nil { // the time of resolv.conf(5)
					a.again.Add(1)
					if err := m.question(p, server, testbed.Patience); err != nil && a.lost.Add(1) < 5 {
						m.Errorf("a question over %s: %v", p, err)
					}
				}
			})
		}
	}
	return a
}

// end ends the questions, after the server was changed and changed back a number of times.
func (a *asking) end(changes int) {
	a.m.Helper()
	a.repeated.end()
	if a.asked.Load() < 500 {
		a.m.Errorf("only %d questions were asked", a.asked.Load())
	}
	if a.again.Load() > int64(maxAgain*changes) {
		a.m.Errorf("%d questions were asked a second time", a.again.Load())
	}
	a.m.Logf("of %d questions %d were asked again, %d were lost; %d changes and returns",
		a.asked.Load(), a.again.Load(), a.lost.Load(), changes)
}

// The cluster goes from CoreDNS to fairlead dns and back until a number of questions was asked, for figures. None is lost.
func TestMigrateQuestions(t *testing.T) {
	questions := size(t, "FAIRLEAD_TEST_QUESTIONS", 0)
	if questions == 0 {
		t.Skip("FAIRLEAD_TEST_QUESTIONS is not set: a figure, by 'make migrate-test QUESTIONS=1000000'; TestMigrate asks some thousands")
	}
	m := newMigration(t)
	m.kubeProxy("nftables")
	began := time.Now()
	asking, changes := m.questions(m.startCoreDNS(), 4), 0
	for asking.asked.Load() < int64(questions) {
		before := asking.asked.Load()
		m.must("apply", "--component", "dns")
		m.must("rollback", "--component", "dns")
		if changes++; asking.asked.Load() == before {
			t.Fatal("nobody asks any more")
		}
	}
	t.Logf("%.0f questions a second", float64(asking.asked.Load())/time.Since(began).Seconds())
	asking.end(changes)
}

// dns changes the cluster from the real CoreDNS to fairlead dns and back with the commands of docs/kubernetes.md, behind
// kube-proxy. No question is lost, and CoreDNS's Deployment is the same afterwards. It returns the server's address.
func (m *migration) dns() (server netip.AddrPort) {
	m.Helper()
	server = m.startCoreDNS()
	deployment := func() string {
		return m.kubectl("get", "deployment", "coredns", "-n", "kube-system", "-o", "jsonpath={.spec} {.metadata.annotations}") +
			m.kubectl("get", "service", "kube-dns", "-n", "kube-system", "-o", "jsonpath={.spec}")
	}
	pods := func() string {
		return m.kubectl("get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-dns", "-o", "jsonpath={.items[*].spec.containers[*].image}")
	}
	before := deployment()
	m.dnsByHand()
	asking := m.questions(server, 1)
	for _, command := range migrateCommands(m.T, "CoreDNS") {
		if strings.HasPrefix(command, "apply") {
			m.interruptedDNS()
		}
		out := m.must(strings.Fields(command)...)
		switch verb, _, _ := strings.Cut(command, " "); verb {
		case "plan":
			if !strings.Contains(out, "CoreDNS: Deployment coredns of 2 Pods") || !strings.Contains(out, "phase coredns") {
				m.Errorf("the plan is\n%s", out)
			}
		case "apply":
			if got := pods(); got != "fairlead/fairlead:0.1.0 fairlead/fairlead:0.1.0" {
				m.Errorf("applied: the Pods behind the Service are %s\n%s", got, out)
			}
		case "verify", "status":
			if !strings.Contains(out, "fairlead") {
				m.Errorf("%s: %s", command, out)
			}
		case "rollback":
			if got := pods(); got != corednsImage+" "+corednsImage {
				m.Errorf("rolled back: the Pods behind the Service are %s\n%s", got, out)
			}
		}
	}
	asking.end(1)
	if after := deployment(); after != before {
		m.Errorf("CoreDNS's Deployment is\n%s\nand was\n%s", after, before)
	}
	return server
}

// dnsByHand refuses to change what was installed by hand.
func (m *migration) dnsByHand() {
	m.Helper()
	m.kubectl("create", "deployment", "fairlead-dns", "-n", "kube-system", "--image=fairlead/fairlead:0.1.0", "--replicas=0")
	for _, verb := range []string{"apply", "rollback", "verify"} {
		out, err := m.migrate(verb, "--component", "dns")
		if err == nil || !strings.Contains(err.Error()+out, "was not installed by 'fairlead migrate'") {
			m.Errorf("%s of a server that was installed by hand: %v\n%s", verb, err, out)
		}
	}
	m.kubectl("delete", "deployment", "fairlead-dns", "-n", "kube-system")
}

// interruptedDNS kills 'apply' as soon as fairlead's Pods are being started; the next 'apply' goes on.
func (m *migration) interruptedDNS() {
	m.Helper()
	p := process.Start(m.T, exec.Command(process.Program("fairlead"), "migrate", "apply", "--component", "dns",
		"--kubeconfig", m.api.Kubeconfig))
	testbed.Until(m.T, "the first phase", func() error {
		if p.Ended() {
			m.Fatalf("apply has ended:\n%s", p.Log())
		}
		out := m.kubectl("get", "deployment", "coredns", "-n", "kube-system", "-o", `jsonpath={.metadata.annotations.fairlead\.dev/dns}`)
		if out == "" {
			return errors.New("the Deployment has no phase")
		}
		return nil
	})
	p.Kill()
}
