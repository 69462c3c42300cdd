package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// kubeDNS waits until n servers are behind the Service kube-dns.
func (c *cluster) kubeDNS(n int) {
	c.t.Helper()
	testbed.Until(c.t, fmt.Sprintf("%d servers behind kube-dns", n), func() error {
		out := c.kubectl("-n", "kube-system", "get", "endpointslices", "-l", "kubernetes.io/service-name=kube-dns",
			"-o", "jsonpath={.items[*].endpoints[?(@.conditions.ready==true)].addresses[0]}")
		if len(strings.Fields(out)) != n {
			return errors.New(out)
		}
		return nil
	})
}

// questions are asked of kube-dns at a steady rate, each from its own port and
// once: an answer that does not come is lost.
type questions struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	asked int
	lost  []string
}

// questionPeriod is the time between two questions of one host.
const questionPeriod = 10 * time.Millisecond

// askSteadily has each host ask for the address of kubernetes.default.
func (c *cluster) askSteadily(from ...*testbed.Host) *questions {
	ctx, cancel := context.WithCancel(c.t.Context())
	q := &questions{cancel: cancel}
	question := new(dns.Msg).SetQuestion("kubernetes.default.svc.cluster.local.", dns.TypeA)
	for _, host := range from {
		q.wg.Go(func() {
			tick := time.NewTicker(questionPeriod)
			defer tick.Stop()
			for ctx.Err() == nil {
				begun := time.Now()
				q.wg.Go(func() {
					err := askOnce(host, question)
					q.mu.Lock()
					defer q.mu.Unlock()
					if q.asked++; err != nil {
						q.lost = append(q.lost, fmt.Sprintf("from %s at %s: %v", host.Name(), begun.Format(time.TimeOnly+".000"), err))
					}
				})
				<-tick.C
			}
		})
	}
	return q
}

// askOnce sends one datagram and waits for its answer.
func askOnce(from *testbed.Host, question *dns.Msg) error {
	conn, err := from.Dial(context.Background(), svc.UDP, netip.AddrPortFrom(netip.MustParseAddr(clusterDNS), 53))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	answer, _, err := new(dns.Client).ExchangeWithConn(question, &dns.Conn{Conn: conn})
	if err == nil && (answer.Rcode != dns.RcodeSuccess || len(answer.Answer) != 1) {
		err = fmt.Errorf("answered %v", answer)
	}
	return err
}

// answered waits until n more questions are over.
func (q *questions) answered(t *testing.T, n int) {
	t.Helper()
	asked := func() int {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.asked
	}
	goal := asked() + n
	testbed.Until(t, "more answers", func() error {
		if now := asked(); now < goal {
			return fmt.Errorf("%d of %d", now, goal)
		}
		return nil
	})
}

// A rolling update of the two servers behind kube-dns loses no question: each agent is
// ended by SIGTERM and started again while programs of both nodes, and machines that
// reach kube-dns through either, ask at a steady rate.
func TestRollingUpdateOfDNS(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "--dns-lameduck", "10s")
	other := c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	agents := map[*testbed.Host]*process.Process{c.node: c.agent, other: c.agentOn(other, "other")}
	up := func(host *testbed.Host) {
		agents[host].Says("is up")
		c.kubeDNS(2)
		testbed.Until(t, "the rules for DNS on "+host.Name(), func() error {
			_, err := process.Try(host.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-dns"))
			return err
		})
	}
	askers := []*testbed.Host{c.node, other}
	for host := range agents {
		up(host)
		client := c.network.Outside("by-" + host.Name())
		client.Route(netip.MustParsePrefix(clusterDNS+"/32"), host.Addr4())
		askers = append(askers, client)
	}
	q := c.askSteadily(askers...)
	defer q.cancel()
	for host := range agents {
		q.answered(t, 200)
		agents[host].Stop()
		q.answered(t, 200)
		agents[host] = c.agentOn(host, map[bool]string{true: "agent", false: "other"}[host == c.node])
		up(host)
	}
	q.answered(t, 200)
	q.cancel()
	q.wg.Wait()
	if len(q.lost) > 0 {
		t.Errorf("%d of %d questions were lost:\n%s", len(q.lost), q.asked, strings.Join(q.lost, "\n"))
	}
	t.Logf("%d questions", q.asked)
}

// 'fairlead up' leaves kube-dns at SIGTERM, where there is another server, and answers
// until its Pods have ended: they look up names to the last.
func TestUpAnswersUntilItsPodsHaveEnded(t *testing.T) {
	t.Parallel()
	c := &cluster{t: t, dir: t.TempDir(), network: testbed.NewNetwork(t)}
	c.node = c.network.Outside("node")
	c.node.Sysctl("net/ipv4/ip_forward", "1")
	c.server, c.api = c.node, process.NewServer(c.node, process.Program("fairlead"), c.path("data"))
	c.cleansUp(c.node, "data")
	up := process.Start(t, c.fairlead(c.node, "up", "--data-dir", c.path("data"), "--node-name", "node",
		"--node-ip", c.node.Addr4().String(), "--dns-lameduck", "1ms"))
	up.Says("fairlead is up")
	elsewhere := c.path("elsewhere.yaml")
	text := "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nports: [{name: dns, port: 10053, protocol: UDP}]\n" +
		"metadata: {name: elsewhere, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}\n" +
		"endpoints: [{addresses: [192.168.77.99]}]\n"
	if err := os.WriteFile(elsewhere, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c.kubectl("create", "-f", elsewhere)
	testbed.Until(t, "the other server in the rules", func() error {
		out, err := process.Try(c.node.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-dns"))
		if err == nil && !strings.Contains(out, "192.168.77.99") {
			err = errors.New(out)
		}
		return err
	})
	// It ignores SIGTERM until the file is there.
	goes, pid := c.path("goes"), c.path("pid")
	c.kubectl("run", "stays", "--image=host", "--overrides", `{"spec":{"terminationGracePeriodSeconds":50}}`, "--command", "--",
		"sh", "-c", `trap "" TERM; echo $$ > `+pid+`; while [ ! -e `+goes+` ]; do sleep 0.05; done; rm `+pid)
	stays := func() error {
		_, err := os.Stat(pid)
		return err
	}
	testbed.Until(t, "the Pod", stays)

	up.Signal(syscall.SIGTERM)
	testbed.Until(t, "the server not to be ready", func() error {
		out, err := process.Try(c.node.Command(t.Context(), "curl", "-sS", "-w", "%{http_code}",
			"-o", "/dev/null", "http://127.0.0.1:9153/ready"))
		if err == nil && out != "503" {
			err = errors.New(out)
		}
		return err
	})
	// The lame-duck time is over. One process asks, so that the Pod's ten seconds are enough on a slow machine.
	const questions = 20
	args := []string{"+short", "+time=5", "-p", "10053", "@" + c.node.Addr4().String()}
	out, err := process.Try(c.node.Command(t.Context(), "dig",
		append(args, slices.Repeat([]string{"kubernetes.default.svc.cluster.local"}, questions)...)...))
	if want := strings.TrimSuffix(strings.Repeat("10.96.0.1\n", questions), "\n"); err != nil || out != want {
		t.Errorf("the server, which stops, answers %q, %v", out, err)
	}
	if err := stays(); err != nil {
		t.Errorf("the Pod has ended: %v", err)
	}
	if err := os.WriteFile(goes, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := up.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
}
