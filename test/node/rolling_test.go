package node

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// connections are opened to a Service at a steady rate, each for one request from a port of
// its own: one that is not answered is lost.
type connections struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu   sync.Mutex
	made int
	lost []lostConnection
}

// lostConnection is one that was not answered.
type lostConnection struct {
	begun time.Time
	target
	err error
}

func (l lostConnection) String() string {
	return fmt.Sprintf("%s from %s at %s: %v", l.protocol, l.from.Name(), l.begun.Format(time.TimeOnly+".000"), l.err)
}

// target is an address of a Service as one host uses it.
type target struct {
	from     *testbed.Host
	protocol svc.Protocol
	at       netip.AddrPort
}

// connect opens a connection to each target every period until it is canceled.
func (c *cluster) connect(period time.Duration, to ...target) *connections {
	ctx, cancel := context.WithCancel(c.t.Context())
	s := &connections{cancel: cancel}
	for _, to := range to {
		s.wg.Go(func() {
			tick := time.NewTicker(period)
			defer tick.Stop()
			for ctx.Err() == nil {
				begun := time.Now()
				s.wg.Go(func() {
					err := to.request(s.port())
					s.mu.Lock()
					defer s.mu.Unlock()
					if err != nil {
						s.lost = append(s.lost, lostConnection{begun, to, err})
					}
				})
				<-tick.C
			}
		})
	}
	return s
}

// port counts a connection and returns its port, which no other one has for a minute: to the
// kernel two questions over UDP from one port are one flow (docs/design/013-programmed-barrier.md).
func (s *connections) port() uint16 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made++
	return uint16(12_000 + s.made%18_000) // below node ports and the kernel's own choice
}

// request makes one request on its own connection; over UDP from a port, 0 for any.
func (to target) request(port uint16) error {
	from := netip.AddrPort{}
	if to.protocol == svc.UDP {
		from = netip.AddrPortFrom(netip.IPv4Unspecified(), port)
	}
	conn, err := to.from.DialFrom(context.Background(), to.protocol, from, to.at)
	if err != nil {
		return err
	}
	defer conn.Close()
	// A lost answer over UDP has no other sign.
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && !strings.Contains(line, " 200 ") && !strings.HasPrefix(line, "rolls-") {
		err = fmt.Errorf("answered %q", line)
	}
	return err
}

const rollingService = `{apiVersion: v1, kind: Service, metadata: {name: rolls, annotations: {fairlead.dev/report-programmed: "true"}},
 spec: {type: NodePort, selector: {app: rolls}, ports: [{name: http, port: 80, targetPort: 9376},
  {name: udp, protocol: UDP, port: 81, targetPort: 9377}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: rolls-direct}, spec: {clusterIP: None, selector: {app: rolls}}}
`

// rollingPod is a Pod whose program ends at once at SIGTERM, without anything that slows
// its end down.
func rollingPod(i int) string {
	return fmt.Sprintf(`---
{apiVersion: v1, kind: Pod, metadata: {name: rolls-%d, labels: {app: rolls}}, spec: {containers: [{name: main, image: host,
  command: [%q, -abrupt, -udp, ":9377"], readinessProbe: {httpGet: {port: 9376, path: /healthz}, periodSeconds: 1}}]}}
`, i, process.Program("backend"))
}

func (c *cluster) apply(text string) {
	c.t.Helper()
	file := c.path("rolls.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("apply", "-f", file)
}

// drainTime is when a Pod was deleted, and when it was first seen that no node sends it new
// connections.
type drainTime struct{ deleted, drained time.Time }

// remove deletes a Pod and waits until it has gone.
func (c *cluster) remove(client kubernetes.Interface, pod string) (d drainTime) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), testbed.Patience)
	defer cancel()
	api := client.CoreV1().Pods("default")
	w, err := api.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + pod})
	if err != nil {
		c.t.Fatal(err)
	}
	defer w.Stop()
	d.deleted = time.Now()
	if err := api.Delete(ctx, pod, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
	for e := range w.ResultChan() {
		p, ok := e.Object.(*corev1.Pod)
		if ok && d.drained.IsZero() && slices.ContainsFunc(p.Status.Conditions, func(k corev1.PodCondition) bool {
			return k.Type == barrier.Drained && k.Status == corev1.ConditionTrue
		}) {
			d.drained = time.Now()
		}
		if e.Type == watch.Deleted {
			return d
		}
	}
	c.t.Fatalf("Pod %s has not ended", pod)
	return d
}

// rollPods replaces Pods one after the other while connections are made from both nodes
// and from outside: none is lost, though the program of each ends at once. On a machine
// that is shared those do not count that were made while a Pod was drained: their requests
// have little time.
func (c *cluster) rollPods(replacements int, nodes []*testbed.Host, outside *testbed.Host, shared bool) {
	c.t.Helper()
	client, err := c.client()
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply(rollingService + rollingPod(0) + rollingPod(1) + rollingPod(2))
	ready := func(pods ...string) {
		c.t.Helper()
		c.kubectl(append([]string{"wait", "--for=condition=Ready", "--timeout=60s"}, pods...)...)
	}
	ready("pod/rolls-0", "pod/rolls-1", "pod/rolls-2")
	programmed := func() {
		c.t.Helper()
		c.kubectl("wait", "--for=condition=fairlead.dev/Programmed", "--timeout=60s", "service/rolls")
	}
	programmed()
	fields := strings.Fields(c.kubectl("get", "service", "rolls", "-o", "jsonpath={.spec.clusterIP} {.spec.ports[*].nodePort}"))
	ip := netip.MustParseAddr(fields[0])
	port := func(i int) uint16 {
		n, err := strconv.ParseUint(fields[i], 10, 16)
		if err != nil {
			c.t.Fatal(err)
		}
		return uint16(n)
	}
	var to []target
	for _, n := range nodes {
		to = append(to, target{n, svc.TCP, netip.AddrPortFrom(ip, 80)}, target{n, svc.UDP, netip.AddrPortFrom(ip, 81)},
			target{outside, svc.TCP, netip.AddrPortFrom(n.Addr4(), port(1))}, target{outside, svc.UDP, netip.AddrPortFrom(n.Addr4(), port(2))})
	}
	for _, t := range to {
		testbed.Until(c.t, "an answer", func() error { return t.request(0) })
	}
	s := c.connect(16*time.Millisecond, to...)
	defer s.cancel()
	var drains []drainTime
	for i := range replacements {
		c.apply(rollingPod(i + 3))
		ready("pod/rolls-" + strconv.Itoa(i+3))
		d := c.remove(client, "rolls-"+strconv.Itoa(i))
		if d.drained.IsZero() {
			c.t.Errorf("Pod rolls-%d was ended before all nodes had reported", i)
		}
		drains = append(drains, d)
	}
	s.cancel()
	s.wg.Wait()
	var longest time.Duration
	for _, d := range drains {
		longest = max(longest, d.drained.Sub(d.deleted))
		if shared {
			s.lost = slices.DeleteFunc(s.lost, func(l lostConnection) bool { return l.begun.After(d.deleted) && l.begun.Before(d.drained) })
		}
	}
	for _, l := range s.lost {
		c.t.Errorf("lost: %s", l)
	}
	c.t.Logf("%d connections, %d lost; nodes had reported after %s at most", s.made, len(s.lost), longest)
	programmed()
}

// A rolling update of Pods loses no connection. Their programs end at once at SIGTERM, 40 ms after the last
// new connection: on a machine that is busy with others an answer may take longer, so this is run where it is
// asked for. TestSets has a short form.
func TestRollingUpdateOfPods(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv("FAIRLEAD_TEST_REPLACEMENTS"))
	if err != nil {
		t.Skip("FAIRLEAD_TEST_REPLACEMENTS is not set: a figure, for a machine of its own")
	}
	c := newCluster(t)
	other, outside := c.network.Outside("other"), c.network.Outside("outside")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other").Says("is up")
	c.nodesReady(2)
	c.rollPods(n, []*testbed.Host{c.node, other}, outside, false)
}
