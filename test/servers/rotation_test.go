package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	several "github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// TestAuthorityOfMembersIsReplaced: the authority of three servers with embedded etcds is replaced under writes and the
// traffic of a Pod, and one server is killed before and after the end. No acknowledged write is lost, no request to the
// Pod fails, neither it nor its agent starts again, and at the end neither etcds nor servers recognise the old authority.
func TestAuthorityOfMembersIsReplaced(t *testing.T) {
	begin := time.Now()
	stage := func(what string) { t.Logf("%s after %s", what, time.Since(begin).Round(10*time.Millisecond)) }
	n := testbed.NewNetwork(t)
	all := together(t, n, 3, "--cluster-signing-duration", "75s")
	stage("three servers")
	pod := newPod(t, n, all[0])
	stage("a Pod")
	thief := stolen(t, all[0])
	for _, m := range all {
		if err := askPeer(t, m, thief.peer); err != nil {
			t.Errorf("%s rejects the authority that it trusts: %v", m.name, err)
		}
	}
	fresh(t, all)
	before := startWriters(t, "before", all)
	if out, err := all[0].run(t, "certs", "rotate-ca"); err != nil {
		t.Fatal(out, err)
	}
	all[2].Kill()
	says(t, all[0], "server "+strings.TrimPrefix(all[2].url(), "https://")+" is down: start it")
	stage("one killed and named")
	all[2].with().start(t)
	says(t, all[2], "the new authority signs")
	stage("the new authority signs")
	before.more(t, 50)
	before.stop()
	fresh(t, all)
	after := startWriters(t, "after", all[:2]) // the third is killed
	testbed.Until(t, "nothing of the old authority to be in use", func() error {
		_, err := all[1].run(t, "certs", "rotate-ca", "--finish")
		return err
	})
	stage("finished")
	all[2].Kill() // before its turn
	all[2].with().start(t)
	says(t, all[1], "the last one is done")
	leavesNothing(t, all[1])
	stage("all etcds restarted")
	after.more(t, 50)
	after.stop()
	fresh(t, all)
	pod.check(t)
	after.log(t)

	for _, m := range all {
		thief.isRejected(t, m)
		hasAll(t, m, before, after)
	}
	list, err := all[0].list(t)
	if err != nil || len(list) != 3 {
		t.Fatalf("%+v, %v", list, err)
	}
	for name, x := range list {
		if x.Role == several.RoleLearner || x.Status == nil || x.Status.Leader == "" {
			t.Errorf("%s: %+v", name, x)
		}
	}
	stage("all checked")
	pod.agent.Stop()
	for _, m := range all {
		m.Kill() // the last ones would wait for a leader
	}
}

// leavesNothing waits until a rotation that is done awaits nobody: until all etcds trust the authority that was kept alone.
func leavesNothing(t *testing.T, m *member) {
	t.Helper()
	testbed.Until(t, "all etcds to trust the authority that was kept alone", func() error {
		out := m.must(t, "certs", "rotate-ca", "--status")
		if strings.Contains(out, "!") {
			return errors.New(out)
		}
		return nil
	})
}

// fresh has the clients use the kubeconfigs of this moment.
func fresh(t *testing.T, all []*member) {
	t.Helper()
	for _, m := range all {
		m.Client = nil
		m.AwaitReady(t)
	}
}

// together starts servers, of which all but the first join that one.
func together(t *testing.T, n *testbed.Network, servers int, flags ...string) (all []*member) {
	t.Helper()
	for i := range servers {
		m := newMember(t, n, fmt.Sprintf("server%d", i+1))
		m.always = flags
		if all = append(all, m); i == 0 {
			m.with("--cluster-init").start(t)
		} else {
			m.with("--join", all[0].url(), "--token-file", all[0].token(t)).Start(t)
		}
	}
	for _, m := range all {
		m.AwaitReady(t)
	}
	awaitMembers(t, all)
	return all
}

// TestRotationOfMembersIsAborted: a server joins two others while the new authority signs, and the rotation is aborted and
// finished by force. No acknowledged write is lost, and no server recognises an administrator of the new authority then.
func TestRotationOfMembersIsAborted(t *testing.T) {
	n := testbed.NewNetwork(t)
	all := together(t, n, 2)
	if out, err := all[0].run(t, "certs", "rotate-ca"); err != nil {
		t.Fatal(out, err)
	}
	says(t, all[1], "the new authority signs")
	fresh(t, all)
	third := newMember(t, n, "server3")
	third.with("--join", all[1].url(), "--token-file", all[1].token(t)).start(t)
	all = append(all, third)
	awaitMembers(t, all)
	thief := stolen(t, third)
	if err := thief.asks(t, third); err != nil {
		t.Errorf("an administrator of the new authority, which signs: %v", err)
	}

	if out, err := third.run(t, "certs", "rotate-ca", "--abort"); err != nil {
		t.Fatal(out, err)
	}
	says(t, all[0], "the old authority signs")
	testbed.Until(t, "all to have certificates of the old authority again", func() error {
		out := all[0].must(t, "certs", "rotate-ca", "--status")
		if strings.Contains(out, "still has a certificate") || strings.Contains(out, "does not trust") {
			return errors.New(out)
		}
		return nil
	})
	fresh(t, all)
	writers := startWriters(t, "aborted", all)
	writers.more(t, 50)
	isRefused := func(why string) {
		t.Helper()
		if out, err := all[0].run(t, "certs", "rotate-ca", "--finish"); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("--finish is not refused with %q: %v\n%s", why, err, out)
		}
	}
	isRefused("does not know yet who uses the authority that goes")
	if err := thief.asks(t, all[0]); err != nil {
		t.Errorf("an administrator of the new authority, before the end: %v", err)
	}
	isRefused("was reached with a certificate of the authority that goes by root")
	if out, err := all[0].run(t, "certs", "rotate-ca", "--finish", "--force"); err != nil {
		t.Fatal(out, err)
	}
	for _, m := range all {
		says(t, m, "the last one is done")
	}
	leavesNothing(t, third)
	writers.more(t, 50)
	writers.stop()
	if writers.log(t); writers.failures > 0 {
		t.Errorf("%d writes failed", writers.failures)
	}
	fresh(t, all)
	for _, m := range all { // peers go on recognising what has a cross certificate: docs/security.md
		if err := thief.asks(t, m); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s recognises an administrator of the authority that was removed: %v", m.name, err)
		}
		hasAll(t, m, writers)
	}
	awaitMembers(t, all)
	third.Kill()
	third.with().start(t) // its files are those of the old authority
	third.has(t, slices.Sorted(maps.Keys(writers.acknowledged))[0])
	for _, m := range all {
		m.Kill() // the last ones would wait for a leader
	}
}

// pod is one on a node, with requests to its Service all the time.
type pod struct {
	agent  *process.Process
	server *member
	before string
	stop   func() (requests int, failed []string)
}

func newPod(t *testing.T, n *testbed.Network, server *member) *pod {
	t.Helper()
	node, dir := n.Outside("node"), t.TempDir()
	node.Sysctl("net/ipv4/ip_forward", "1")
	on := func(host *testbed.Host, args ...string) *exec.Cmd {
		cmd := host.Command(context.Background(), process.Program("fairlead"), args...)
		cmd.Env = append(os.Environ(), "HOME="+dir, "KUBECONFIG="+server.Kubeconfig)
		return cmd
	}
	p := &pod{server: server}
	t.Cleanup(func() { process.Output(t, on(node, "cleanup", "--data-dir", dir)) })
	p.agent = process.Start(t, on(node, "agent", "--server", server.url(), "--token", read(t, filepath.Join(server.dir, "node-token")),
		"--node-name", "node", "--node-ip", node.Addr4().String(), "--data-dir", dir))
	process.Output(t, on(server.host, "run", "-d", "-l", "app=web", "-p", "http=9376", "--name", "web",
		"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	made, err := server.Client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(9376)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return node.Dial(ctx, svc.TCP, at) },
	}}
	ask := func() error {
		answer, err := client.Get("http://web/")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		_, err = io.Copy(io.Discard, answer.Body)
		return err
	}
	testbed.Until(t, "an answer of the Pod", ask)
	p.before = p.state(t)
	ctx, cancel := context.WithCancel(t.Context())
	requests, failed, done := 0, []string(nil), make(chan struct{})
	go func() {
		defer close(done)
		for ; ctx.Err() == nil; requests++ {
			if err := ask(); err != nil {
				failed = append(failed, fmt.Sprintf("%s: %v", time.Now().Format(time.TimeOnly), err))
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	p.stop = func() (int, []string) { cancel(); <-done; return requests, failed }
	t.Cleanup(func() { p.stop() })
	return p
}

// state is which process the Pod is.
func (p *pod) state(t *testing.T) string {
	t.Helper()
	list, err := p.server.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil || len(list.Items) != 1 || len(list.Items[0].Status.ContainerStatuses) != 1 {
		t.Fatalf("%d Pods, %v; want one with one container", len(list.Items), err)
	}
	got := &list.Items[0]
	c := got.Status.ContainerStatuses[0]
	return fmt.Sprint(got.UID, got.Status.PodIP, c.RestartCount, c.ContainerID, c.State.Running)
}

// check ends the requests, and checks that neither the Pod nor its agent has noticed anything.
func (p *pod) check(t *testing.T) {
	t.Helper()
	requests, failed := p.stop()
	t.Logf("%d requests to the Pod, %d failed", requests, len(failed))
	if len(failed) > 0 || requests == 0 {
		t.Errorf("%d of %d requests failed:\n%s", len(failed), requests, strings.Join(failed, "\n"))
	}
	if now := p.state(t); now != p.before {
		t.Errorf("the Pod is %s, and was %s", now, p.before)
	}
	if log := p.agent.Log(); strings.Contains(log, "Unauthorized") {
		t.Errorf("the agent had requests rejected:\n%s", log)
	}
}

// says waits until the status of the rotation has a text.
func says(t *testing.T, m *member, text string) {
	t.Helper()
	testbed.Until(t, fmt.Sprintf("the rotation to be where %q", text), func() error {
		out, err := m.run(t, "certs", "rotate-ca", "--status")
		if err == nil && !strings.Contains(out, text) {
			err = errors.New(out)
		}
		return err
	})
}

// hasAll checks that a server has all that was acknowledged.
func hasAll(t *testing.T, m *member, all ...*writers) {
	t.Helper()
	list, err := m.Client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]bool{}
	for _, c := range list.Items {
		has[c.Name] = true
	}
	for _, w := range all {
		for name := range w.acknowledged {
			if !has[name] {
				t.Errorf("%s has lost %s, which was acknowledged", m.name, name)
			}
		}
	}
}

// loot is what whoever has stolen an authority's key makes with it.
type loot struct {
	peer  tls.Certificate
	admin rest.TLSClientConfig
}

// stolen takes the key of the authority from a server.
func stolen(t *testing.T, m *member) loot {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pki")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(m.dir, "pki"))); err != nil {
		t.Fatal(err)
	}
	d, err := pki.Open(dir, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.Ensure(pki.Leaf{Name: "thief", CommonName: "fairlead-server", DNSNames: []string{several.PeerName}, Peer: true})
	if err != nil {
		t.Fatal(err)
	}
	out := loot{}
	if out.peer, err = tls.X509KeyPair(p.Cert, p.Key); err != nil {
		t.Fatal(err)
	}
	if p, err = d.Ensure(pki.Leaf{Name: "root", CommonName: "root", Groups: []string{"system:masters"}}); err != nil {
		t.Fatal(err)
	}
	out.admin = rest.TLSClientConfig{Insecure: true, CertData: p.Cert, KeyData: p.Key}
	return out
}

// isRejected checks that neither the etcd nor the API of a server recognises the loot.
func (l loot) isRejected(t *testing.T, m *member) {
	t.Helper()
	if err := askPeer(t, m, l.peer); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("the etcd of %s recognises the authority that was removed: %v", m.name, err)
	}
	if err := l.asks(t, m); !apierrors.IsUnauthorized(err) {
		t.Errorf("%s recognises the authority that was removed: %v", m.name, err)
	}
}

// asks asks the API of a server as the administrator of the loot.
func (l loot) asks(t *testing.T, m *member) error {
	cfg := rest.CopyConfig(m.Config)
	cfg.TLSClientConfig = l.admin
	_, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	return err
}
