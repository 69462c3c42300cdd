package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// healthz returns the code and the body of /healthz.
func healthz(p *Proxy) (int, healthBody, error) {
	w := httptest.NewRecorder()
	p.serveHealthz(w, nil)
	var body healthBody
	err := json.Unmarshal(w.Body.Bytes(), &body)
	return w.Code, body, err
}

func wantHealthz(t *testing.T, when string, p *Proxy, code int, eligible bool) {
	t.Helper()
	got, body, err := healthz(p)
	if err != nil || got != code || body.NodeEligible == nil || *body.NodeEligible != eligible {
		t.Errorf("%s: /healthz %d %+v, %v, want %d, eligible %v", when, got, body, err, code, eligible)
	}
}

// /healthz fails until all is programmed and while there is no Node.
func TestHealthzNeedsTheNode(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		nodes := w.client.CoreV1().Nodes()
		w.settle(time.Minute)
		wantHealthz(t, "no Node", w.proxy, 503, false)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
		if _, err := nodes.Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Minute)
		wantHealthz(t, "with its Node", w.proxy, 200, true)
		if err := nodes.Delete(t.Context(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Minute)
		wantHealthz(t, "its Node deleted", w.proxy, 503, false)
	})
}

// What another program does to the rules is repaired at once, but no more often
// than repairInterval, and /healthz fails until it is.
func TestTamperingIsRepairedAtOnce(t *testing.T) {
	inBubble(t, func(o *Options) { o.AuditPeriod = time.Hour }, func(w *world) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
		if _, err := w.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.setService(service("a", 1))
		w.settle(time.Minute)
		whole := w.dump()
		for range 3 {
			w.plane.set(func(p *fakeDataplane) {
				clear(p.kernel)
				p.fail = func() error { return errors.New("no buffer space available") }
			})
			w.plane.Notify()
			w.settle(20 * time.Second)
			wantHealthz(t, "flushed", w.proxy, 503, true)
			w.plane.set(func(p *fakeDataplane) { p.fail = nil })
			w.settle(20 * time.Second)
			if got := w.dump(); got != whole {
				t.Errorf("kernel has %q, want %q", got, whole)
			}
			wantHealthz(t, "repaired", w.proxy, 200, true)
		}
		first := len(w.plane.log())
		for range 1000 { // for 10 s
			w.plane.Notify()
			w.settle(10 * time.Millisecond)
		}
		if n := len(w.plane.log()) - first; n < 19 || n > 21 {
			t.Errorf("%d full comparisons in 10 s of notifications, want one each %s", n, repairInterval)
		}
	})
}

// nodePortService is a Service with a node port, one endpoint and a Node for it.
func nodePortService(vip netip.AddrPort, nodePort int32, endpoint netip.Addr) *fake.Clientset {
	meta := metav1.ObjectMeta{Namespace: "default", Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}
	port, name, tcp := int32(9376), "", corev1.ProtocolTCP
	return fake.NewClientset(
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: vip.Addr().String(), ClusterIPs: []string{vip.Addr().String()},
			Ports: []corev1.ServicePort{{Protocol: tcp, Port: int32(vip.Port()), NodePort: nodePort}},
		}},
		&discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports:     []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{endpoint.String()}}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
}

func damagesOf(table string) []string {
	return []string{"nft flush ruleset", "nft delete table ip " + table, "nft flush table ip " + table, "nft flush ruleset"}
}

// The rules of a real kernel are repaired, and a node port answers on a new
// address, long before the next audit. No period is short enough to help. Of
// iptables-legacy the kernel reports nothing, and its tables are looked at.
func TestHealsByNotifications(t *testing.T) {
	for _, m := range []struct {
		name    string
		damages []string
		create  flows.Factory
	}{
		{"nft", damagesOf("fairlead"), modes[0].create},
		{"iptables-nft", []string{
			"nft flush ruleset", "nft flush chain ip nat FAIRLEAD-SERVICES", "nft flush chain ip nat PREROUTING", "nft flush table ip nat",
			"nft flush ruleset",
		}, modes[1].create},
		{"iptables-legacy", []string{"iptables-legacy -t nat -F", "iptables-legacy -t nat -F FAIRLEAD-SERVICES"}, modes[2].create},
		{"userspace", damagesOf("fairlead-userspace"), func(t testing.TB, _ *testbed.Host) dataplane.Applier {
			p, err := userspace.New(userspace.Config{})
			return made(t, p, err)
		}},
	} {
		t.Run(m.name, func(t *testing.T) {
			e := flows.NewEnv(t, m.create)
			vip, client := netip.MustParseAddrPort("10.96.0.10:80"), e.Host("c")
			p := startProxy(t, e.Node, Options{
				Client: nodePortService(vip, 30080, e.Host("a").Addr4()), NodeName: "node", Dataplane: e.Dataplane, Mode: m.name,
				AuditPeriod: time.Hour, AddressPeriod: time.Hour,
			})
			answers := func(at netip.AddrPort) error {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				got, err := client.Ask(ctx, svc.TCP, at)
				if err == nil && got.Name != "a" {
					err = fmt.Errorf("%s answers", got.Name)
				}
				return err
			}
			healthy := func() error {
				if code, body, err := healthz(p); code != 200 {
					return fmt.Errorf("/healthz %d %+v, %v", code, body, err)
				}
				return nil
			}
			testbed.Until(t, "the Service", func() error { return errors.Join(answers(vip), healthy()) })
			for _, damage := range m.damages {
				start := time.Now()
				words := strings.Fields(damage)
				if out, err := e.Node.Command(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", damage, err, out)
				}
				testbed.Until(t, "the repair after "+damage, func() error { return errors.Join(answers(vip), healthy()) })
				t.Logf("%s: repaired after %s", damage, time.Since(start).Round(time.Millisecond))
			}
			fresh := netip.MustParseAddr("192.0.2.77")
			start := time.Now()
			e.Node.AddAddr(fresh)
			testbed.Until(t, "the node port on a new address", func() error { return answers(netip.AddrPortFrom(fresh, 30080)) })
			t.Logf("a node port answers on a new address after %s", time.Since(start).Round(time.Millisecond))
		})
	}
}
