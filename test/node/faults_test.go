package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A server and two nodes, through a full disk, kills, flushed tables, a Node that lies
// about its range, a deleted Node, an agent that chooses its address again, and the end
// of the certificates that they began with. Afterwards everything is as it should be,
// and no acknowledged write is lost. The time that each took to heal is in the log.
func TestFaults(t *testing.T) {
	t.Parallel()
	const life = time.Minute // of certificates
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node")}
	other := network.Outside("other")
	smallDisk(t, c.path("server"))
	c.api = process.NewServer(c.server, process.Program("fairlead"), c.path("server"),
		"--bind-address", "127.0.0.1,"+c.server.Addr4().String(), "--cluster-signing-duration", life.String())
	c.api.Start(t)
	c.api.AwaitReady(t)
	began := time.Now()
	for _, h := range []*testbed.Host{c.node, other} {
		h.Sysctl("net/ipv4/ip_forward", "1")
		c.cleansUp(h, h.Name())
	}
	start := func(h *testbed.Host, flags ...string) *process.Process { return c.agentOn(h, h.Name(), flags...) }
	agents := map[*testbed.Host]*process.Process{c.node: start(c.node), other: start(other)}
	c.nodesReady(2)
	at := c.backends()
	served := func(on *testbed.Host) func() error { return func() error { return connects(on, at) } }
	w := startWriter(t, c)
	heals := func(what string, fault func(), check func() error) {
		t.Helper()
		fault()
		since := time.Now()
		testbed.Until(t, what+" to heal", check)
		t.Logf("%-52s healed after %s", what, time.Since(since).Round(10*time.Millisecond))
	}

	// First, as no certificate can be renewed meanwhile.
	full := fillDisk(t, c)
	heals("disk full, then room (3)", func() {
		if err := os.Remove(full); err != nil {
			t.Fatal(err)
		}
	}, w.writes())
	heals("server killed", func() { c.api.Process.Kill(); c.api.Start(t) }, w.writes())
	for h := range agents {
		heals("agent killed on "+h.Name(), func() { agents[h].Kill(); agents[h] = start(h) }, served(h))
		agents[h].Says("is up")
	}
	heals("tables flushed (11)", func() { process.Output(t, c.on(other, "nft", "flush", "ruleset")) }, served(other))
	heals("a Node with the range 0.0.0.0/0, deleted (2)", func() {
		c.kubectl("apply", "-f", c.file("liar", "{apiVersion: v1, kind: Node, metadata: {name: liar}, spec: {podCIDR: 0.0.0.0/0}}"))
		testbed.Until(t, "the range to be rejected", func() error { return c.routed("False") })
		c.kubectl("delete", "node", "liar")
	}, func() error { return c.routed("True") })
	heals("Node deleted, and let back", func() {
		c.kubectl("delete", "node", "other", "--wait=false")
		process.Output(t, c.fairlead(c.server, "node", "admit", "other"))
	}, func() error { return c.ready(2) })
	heals("agent restarted, chooses its address (14)", func() {
		agents[other].Stop()
		agents[other] = process.Start(t, c.fairlead(other, "agent", "--server", "https://"+c.server.Addr4().String()+":6443",
			"--node-name", "other", "--data-dir", c.path("other")))
		agents[other].Says("is up")
	}, func() error { return c.ready(2) })

	// The certificates of the beginning have ended.
	testbed.Until(t, "the first certificates to end", func() error {
		if left := life - time.Since(began); left > 0 {
			return fmt.Errorf("%s left", left)
		}
		return nil
	})
	testbed.Until(t, "a write", w.writes())
	acknowledged := w.stop()
	c.asExpected(acknowledged, []*testbed.Host{c.node, other}, served)
}

// connects makes one connection within a second, which an unhealed node may not.
func connects(on *testbed.Host, at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn, err := on.Dial(ctx, svc.TCP, at)
	if err == nil {
		err = conn.Close()
	}
	return err
}

// client returns a client with the administrator's certificate of the moment.
func (c *cluster) client() (*kubernetes.Clientset, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", c.api.Kubeconfig)
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1
	cfg.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		c.server.Do(func() { conn, err = (&net.Dialer{}).DialContext(ctx, network, address) })
		return conn, err
	}
	return kubernetes.NewForConfig(cfg)
}

// ready returns an error unless n Nodes are Ready.
func (c *cluster) ready(n int) error {
	out, err := c.try("get", "nodes")
	if err == nil && strings.Count(out, " Ready ") != n {
		err = errors.New(out)
	}
	return err
}

// smallDisk mounts a small file system, in the mount namespace of the tests.
func smallDisk(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	process.Output(t, exec.Command("mount", "-t", "tmpfs", "-o", "size=400m,mode=0700", "small", dir))
	t.Cleanup(func() { _ = exec.Command("umount", "-l", dir).Run() })
}

// fillDisk fills the server's disk, until it rejects writes. It returns the file to remove.
func fillDisk(t *testing.T, c *cluster) (file string) {
	t.Helper()
	file = c.path("server/filler")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zero := make([]byte, 1<<20)
	for err == nil {
		_, err = f.Write(zero)
	}
	testbed.Until(t, "a write to be rejected", func() error {
		client, err := c.client()
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err = client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "full-"}}, metav1.CreateOptions{})
		if !strings.Contains(fmt.Sprint(err), "the disk of") {
			return fmt.Errorf("a write on a full disk: %w", err)
		}
		t.Logf("the disk is full: %v", err)
		return nil
	})
	return file
}

// podRanges are the routes to other nodes' Pods on a host.
func podRanges(c *cluster, on *testbed.Host) []string {
	var out []string
	for line := range strings.Lines(process.Output(c.t, c.on(on, "ip", "-4", "route", "show"))) {
		if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "10.244.") && strings.Contains(line, " via ") {
			out = append(out, f[0])
		}
	}
	return out
}

func podRoutes(c *cluster, on *testbed.Host) error {
	if got := podRanges(c, on); len(got) != 1 {
		return fmt.Errorf("routes to Pods of other nodes: %v", got)
	}
	return nil
}

// routed returns an error unless the condition PodsRouted of both nodes is status.
func (c *cluster) routed(status string) error {
	out, err := c.try("get", "nodes", "node", "other", "-o",
		`jsonpath={.items[*].status.conditions[?(@.type=="fairlead.dev/PodsRouted")].status}`)
	if err == nil && out != status+" "+status {
		err = errors.New(out)
	}
	return err
}

// file writes a file and returns its name.
func (c *cluster) file(name, text string) string {
	c.t.Helper()
	if err := os.WriteFile(c.path(name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return c.path(name)
}

// writer creates ConfigMaps one after the other.
type writer struct {
	mu   sync.Mutex
	done []string
	end  func()
}

func startWriter(t *testing.T, c *cluster) *writer {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	w := &writer{}
	w.end = sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(w.end)
	go func() {
		defer close(ended)
		var client *kubernetes.Clientset
		for i := 0; ctx.Err() == nil; i++ {
			name, err := fmt.Sprintf("written-%d", i), error(nil)
			if client == nil {
				client, err = c.client()
			}
			if err == nil {
				bounded, stop := context.WithTimeout(ctx, 5*time.Second)
				_, err = client.CoreV1().ConfigMaps("default").Create(bounded,
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				stop()
			}
			if err != nil {
				client = nil // its certificate may have ended
			} else {
				w.mu.Lock()
				w.done = append(w.done, name)
				w.mu.Unlock()
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return w
}

func (w *writer) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.done)
}

// writes returns a check that there has been a write since its first call.
func (w *writer) writes() func() error {
	before := -1
	return func() error {
		now := w.count()
		if before < 0 {
			before = now
		}
		if now == before {
			return fmt.Errorf("no write after the first %d", now)
		}
		return nil
	}
}

func (w *writer) stop() []string {
	w.end()
	return w.done
}

// asExpected wants the state of a cluster to which nothing has happened.
func (c *cluster) asExpected(acknowledged []string, hosts []*testbed.Host, served func(*testbed.Host) func() error) {
	t := c.t
	t.Helper()
	c.nodesReady(len(hosts))
	for _, h := range hosts {
		testbed.Until(t, "answers on "+h.Name(), served(h))
		testbed.Until(t, "routes on "+h.Name(), func() error { return podRoutes(c, h) })
	}
	testbed.Until(t, "all ranges to be routed", func() error { return c.routed("True") })
	testbed.Until(t, "both endpoints to be ready", func() error {
		out, err := c.try("get", "endpointslices", "-l", "kubernetes.io/service-name=my-service",
			"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
		if err == nil && out != "true true" {
			err = errors.New(out)
		}
		return err
	})
	c.holds(acknowledged)
	addresses := c.kubectl("get", "ipaddresses", "-o", "jsonpath={range .items[*]}{.metadata.name}{\"\\n\"}{end}")
	used := c.kubectl("get", "services", "-A", "-o", "jsonpath={range .items[*]}{range .spec.clusterIPs[*]}{@}{\"\\n\"}{end}{end}")
	if a, b := sortedLines(addresses), sortedLines(used); !slices.Equal(a, b) {
		t.Errorf("claims of addresses are %v, Services use %v", a, b)
	}
}

// holds wants that no acknowledged write is lost.
func (c *cluster) holds(acknowledged []string) {
	t := c.t
	t.Helper()
	client, err := c.client()
	if err != nil {
		t.Fatal(err)
	}
	list, err := client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for i := range list.Items {
		have = append(have, list.Items[i].Name)
	}
	slices.Sort(have)
	lost := 0
	for _, name := range acknowledged {
		if _, found := slices.BinarySearch(have, name); !found {
			lost++
		}
	}
	t.Logf("%d acknowledged writes, %d lost", len(acknowledged), lost)
	if lost > 0 || len(acknowledged) == 0 {
		t.Errorf("%d of %d acknowledged writes are lost", lost, len(acknowledged))
	}
}

func sortedLines(s string) []string {
	out := strings.Fields(s)
	slices.Sort(out)
	return out
}
