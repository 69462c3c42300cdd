// Package node runs servers and agents as processes on hosts of the testbed and
// does to them what happens to processes: they are killed, restarted, removed.
package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The tests that run side by side wait as long as they work, also on a machine of two
// processors, which has the tests of another package to run, too.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "3"); err != nil {
		panic(err)
	}
	process.Main(func() int { return testbed.Run(m) }, "fairlead", "backend", "kubectl", "wireguard-go")
}

// cluster is one server and one agent on a host each.
type cluster struct {
	t            *testing.T
	dir          string
	network      *testbed.Network
	server, node *testbed.Host
	api          *process.Server
	agent        *process.Process
	// agentFlags are further flags for agents.
	agentFlags []string
}

func newCluster(t *testing.T, agentFlags ...string) *cluster {
	t.Helper()
	return newClusterOf(t, nil, agentFlags)
}

// newClusterOf is newCluster with further flags of the server.
func newClusterOf(t *testing.T, serverFlags, agentFlags []string) *cluster {
	t.Helper()
	c := newServer(t, serverFlags, agentFlags)
	c.cleansUp(c.node, "agent")
	c.startAgent()
	c.nodesReady(1)
	return c
}

// newServer returns a cluster whose agent has not been started.
func newServer(t *testing.T, serverFlags, agentFlags []string) *cluster {
	t.Helper()
	network := testbed.NewNetwork(t)
	c := &cluster{
		t: t, dir: t.TempDir(), network: network,
		server: network.Outside("server"), node: network.Outside("node"), agentFlags: agentFlags,
	}
	c.node.Sysctl("net/ipv4/ip_forward", "1")
	c.api = process.NewServer(c.server, process.Program("fairlead"), c.path("server"),
		append(serverFlags, "--bind-address", "127.0.0.1,"+c.server.Addr4().String())...)
	c.api.Start(t)
	c.api.AwaitReady(t)
	return c
}

// cleansUp lets fairlead clean up a host at the end of the test, after its agent.
func (c *cluster) cleansUp(on *testbed.Host, dir string) {
	c.t.Cleanup(func() { process.Output(c.t, c.fairlead(on, "cleanup", "--data-dir", c.path(dir))) })
}

// nodesReady waits until n Nodes are Ready.
func (c *cluster) nodesReady(n int) {
	c.t.Helper()
	testbed.Until(c.t, fmt.Sprintf("%d nodes to be Ready", n), func() error {
		client, err := c.client() // some tests have certificates of a minute
		if err != nil {
			return err
		}
		nodes, err := client.CoreV1().Nodes().List(c.t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		ready := 0
		for _, node := range nodes.Items {
			if i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady }); i >= 0 &&
				node.Status.Conditions[i].Status == corev1.ConditionTrue {
				ready++
			}
		}
		if ready != n {
			return fmt.Errorf("%d of %d are", ready, len(nodes.Items))
		}
		return nil
	})
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// on is a command on a host, with the environment of an administrator.
func (c *cluster) on(host *testbed.Host, program string, args ...string) *exec.Cmd {
	cmd := host.Command(context.Background(), program, args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.api.Kubeconfig)
	return cmd
}

func (c *cluster) fairlead(on *testbed.Host, args ...string) *exec.Cmd {
	return c.on(on, process.Program("fairlead"), args...)
}

func (c *cluster) startAgent() {
	c.t.Helper()
	c.agent = c.agentOn(c.node, "agent")
}

// agentOn starts an agent on a host, whose name is the node's; its state is in a
// directory of the cluster's.
func (c *cluster) agentOn(on *testbed.Host, dir string, flags ...string) *process.Process {
	c.t.Helper()
	return process.Start(c.t, c.fairlead(on, c.agentArgs(on, dir, flags...)...))
}

// agentArgs are the arguments of an agent on a host. Its lame-duck time is a second unless its
// flags tell otherwise.
func (c *cluster) agentArgs(on *testbed.Host, dir string, flags ...string) []string {
	c.t.Helper()
	token, err := os.ReadFile(c.path("server/node-token"))
	if err != nil {
		c.t.Fatal(err)
	}
	args := []string{"agent", "--server", "https://" + c.server.Addr4().String() + ":6443", "--token", strings.TrimSpace(string(token)),
		"--node-name", on.Name(), "--node-ip", on.Addr4().String(), "--data-dir", c.path(dir), "--dns-lameduck", "1s"}
	return slices.Concat(args, c.agentFlags, flags)
}

// agentUp waits until the agent has programmed the Services.
func (c *cluster) agentUp() {
	c.t.Helper()
	c.agent.Says("is up")
}

// kubectl runs on the server's host and must succeed.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.try(args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// try runs kubectl, whose error has its output, too.
func (c *cluster) try(args ...string) (string, error) {
	return process.Try(c.on(c.server, process.Program("kubectl"), args...))
}

// backends runs two Pods behind my-service and returns its ClusterIP.
func (c *cluster) backends() netip.AddrPort {
	c.t.Helper()
	process.Output(c.t, c.fairlead(c.server, "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", "2",
		"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	c.kubectl("apply", "-f", "../../examples/my-service.yaml")
	ip := netip.MustParseAddr(c.kubectl("get", "svc", "my-service", "-o", "jsonpath={.spec.clusterIP}"))
	at := netip.AddrPortFrom(ip, 80)
	testbed.Until(c.t, "an answer", func() error { return c.ask(at) })
	return at
}

// ask makes one request from the node, on its own connection.
func (c *cluster) ask(at netip.AddrPort) error { return c.askFrom(c.node, at) }

// askFrom makes one request from a host.
func (c *cluster) askFrom(host *testbed.Host, at netip.AddrPort) error {
	_, err := c.answer(host, at)
	return err
}

// answer makes one request from a host, and returns the name of the backend that answers.
func (c *cluster) answer(host *testbed.Host, at netip.AddrPort) (string, error) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return host.Dial(ctx, svc.TCP, at)
		},
	}}
	answer, err := client.Get("http://my-service/")
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	name, _, _ := strings.Cut(string(text), " ")
	return name, err
}

// started has a line for each Pod: its name, how often and when its container
// was started, its address.
func (c *cluster) started() string {
	c.t.Helper()
	const container = ".status.containerStatuses[0]"
	return c.kubectl("get", "pods", "-o", "jsonpath={range .items[*]}{.metadata.name} {"+container+".restartCount} "+
		"{"+container+".state.running.startedAt} {.status.podIP}{\"\\n\"}{end}")
}

// hostPort runs a Pod with host ports, and returns the one on the node's own address.
func (c *cluster) hostPort() netip.AddrPort {
	c.t.Helper()
	text, err := os.ReadFile("testdata/hostport.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	create := c.on(c.server, process.Program("kubectl"), "create", "-f", "-")
	create.Stdin = strings.NewReader(strings.ReplaceAll(string(text), "BACKEND", process.Program("backend")))
	process.Output(c.t, create)
	at := netip.AddrPortFrom(c.node.Addr4(), 8080)
	testbed.Until(c.t, "the host port to answer", func() error { return c.askFrom(c.server, at) })
	for _, at := range []string{"127.0.0.1:8080", "127.0.0.1:8443", at.String()} {
		if err := c.ask(netip.MustParseAddrPort(at)); err != nil {
			c.t.Errorf("the node does not reach the host port at %s: %v", at, err)
		}
	}
	if err := c.askFrom(c.server, netip.AddrPortFrom(c.node.Addr4(), 8443)); !testbed.Refused(err) {
		c.t.Errorf("a host port of 127.0.0.1 answers at the node's other address: %v", err)
	}
	return at
}

// A killed agent takes nothing with it: connections to Services and to host ports go on
// being answered (behaviours 50, 209), its Pods live on, and the next agent finds all.
func TestKilledAgent(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	at, front := c.backends(), c.hostPort()
	before := c.started()

	var asked, failed atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if err := errors.Join(c.ask(at), c.askFrom(c.server, front)); err != nil && ctx.Err() == nil {
				failed.Add(1)
				t.Logf("request %d: %v", asked.Load(), err)
			}
			asked.Add(1)
		}
	}()
	answered := func(n int64) {
		t.Helper()
		goal := asked.Load() + n
		testbed.Until(c.t, "more answers", func() error {
			if asked.Load() < goal {
				return fmt.Errorf("%d of %d", asked.Load(), goal)
			}
			return nil
		})
	}
	answered(50)
	c.agent.Kill()
	answered(200)
	c.startAgent()
	c.agentUp()
	answered(200)
	cancel()
	<-done
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed while the agent was killed and started again", failed.Load(), asked.Load())
	}
	if after := c.started(); after != before {
		t.Errorf("the Pods were not left alone:\nbefore\n%s\nafter\n%s", before, after)
	}
	if strings.Count(c.agent.Log(), "adopted a running pod") != 3 {
		t.Error("the agent did not adopt its Pods")
	}
	if out := c.kubectl("exec", strings.Fields(before)[0], "--", "hostname"); out != strings.Fields(before)[0] {
		t.Errorf("exec into an adopted Pod printed %q", out)
	}
	c.kubectl("delete", "pod", "front")
	testbed.Until(t, "the host port of a Pod that is gone to be closed", func() error {
		if err := c.askFrom(c.server, front); !testbed.Refused(err) {
			return fmt.Errorf("asked there: %w", err)
		}
		return nil
	})
}

// kernelState is what the node's network namespace has.
func (c *cluster) kernelState() []string {
	c.t.Helper()
	all := testbed.KernelState(c.t, func(name string, args ...string) *exec.Cmd { return c.node.Command(c.t.Context(), name, args...) })
	c.node.Do(func() {
		sets, err := ipset.Dial()
		if err != nil {
			c.t.Fatal(err)
		}
		defer sets.Close()
		names, err := sets.Names()
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("sets %q", names))
	})
	return all
}

// fairlead cleanup leaves no rule, set, device, address, route, parameter, process or state
// behind, whichever modes the node was in.
func TestCleanupLeavesNothing(t *testing.T) {
	t.Parallel()
	c := newServer(t, nil, nil)
	c.node.Sysctl("net/ipv4/ip_forward", "0")
	before := c.kernelState()
	c.cleansUp(c.node, "agent")
	c.startAgent()
	c.nodesReady(1)
	c.backends()
	c.refusalsAreCounted()
	for _, trace := range []string{`"fairlead-iptables-dropped-6"`, "FAIRLEAD-SERVICES", "fl0", "net.ipv4.ip_forward = 1"} {
		if now := strings.Join(c.kernelState(), "\n"); !strings.Contains(now, trace) {
			t.Fatalf("an agent at work leaves no %q that this test could miss:\n%s", trace, now)
		}
	}
	c.agent.Stop()
	process.Output(t, c.fairlead(c.node, "cleanup", "--data-dir", c.path("agent")))
	if left := cmp.Diff(before, c.kernelState()); left != "" {
		t.Errorf("cleanup left:\n%s", left)
	}
	if _, err := os.Stat(c.path("agent/agent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("cleanup left the node's state: %v", err)
	}
	var none *exec.ExitError
	if out, err := exec.Command("pgrep", "-f", c.path("agent")).Output(); !errors.As(err, &none) || none.ExitCode() != 1 {
		t.Errorf("cleanup left processes: %s, %v", out, err)
	}
}

// logs, exec and port-forward reach a Pod through the API server.
func TestKubectlReachesPods(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.backends()
	pod := strings.Fields(c.started())[0]
	if out := c.kubectl("logs", pod); out != "listening on :9376" {
		t.Errorf("kubectl logs printed %q", out)
	}
	if _, err := c.try("exec", pod, "--", "sh", "-c", "exit 3"); err == nil || !strings.Contains(err.Error(), "exit code 3") {
		t.Errorf("the exit code did not come back: %v", err)
	}
	if out := c.kubectl("exec", pod, "--", "cat", "/etc/hosts"); !strings.Contains(out, pod) {
		t.Errorf("/etc/hosts of the Pod is %q", out)
	}
	// behaviour 69: the variables of a Service that was there before the Pod.
	if out := c.kubectl("exec", pod, "--", "env"); !strings.Contains(out, "KUBERNETES_SERVICE_HOST=10.96.0.1") {
		t.Errorf("the Pod's variables are %q", out)
	}
	// A client in the Pod finds the API and its token by itself, by the Service.
	who := c.kubectl("exec", pod, "--", "env", "HOME=/nonexistent", process.Program("kubectl"), "auth", "whoami")
	if !strings.Contains(who, "system:serviceaccount:default:default") || !strings.Contains(who, pod) {
		t.Errorf("the Pod is %q", who)
	}
	// So does fairlead, and is no more than the Pod's service account.
	env := []string{"exec", pod, "--", process.Program("fairlead"), "env", "-n", "default"}
	if out, err := c.try(env...); err == nil || !strings.Contains(out, `"system:serviceaccount:default:default" cannot`) {
		t.Errorf("without any right: %v, %q", err, out)
	}
	c.kubectl("create", "rolebinding", "reader", "--clusterrole=view", "--serviceaccount=default:default")
	if out := c.kubectl(env...); !strings.Contains(out, "KUBERNETES_SERVICE_HOST=10.96.0.1") {
		t.Errorf("fairlead env in the Pod prints %q", out)
	}
	forward := process.Start(t, c.on(c.server, process.Program("kubectl"), "port-forward", pod, "19376:9376"))
	testbed.Until(t, "an answer through the forwarded port", func() error {
		out, err := process.Try(c.server.Command(t.Context(), "curl", "-sS", "--max-time", "5", "http://127.0.0.1:19376/"))
		if err == nil && !strings.HasPrefix(out, pod) {
			err = fmt.Errorf("answer %q", out)
		}
		return err
	})
	forward.Kill()
	for name, log := range map[string]string{"server": c.api.Log(), "agent": c.agent.Log()} {
		if strings.Contains(log, "level=ERROR") {
			t.Errorf("ordinary use is an error in the log of the %s:\n%s", name, log)
		}
	}
}

// A UDP client that keeps its socket is not left with a connection tracking entry
// to a Pod that is gone: it is refused when the last one goes, and answered again,
// on the same socket, when there is a new one (kubernetes/kubernetes#139628). The
// whole over IPv6 as well.
func TestUDPFlowsFollowTheEndpoints(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.kubectl("create", "-f", "testdata/udp.yaml")
	run := func() {
		t.Helper()
		process.Output(t, c.fairlead(c.server, "run", "-d", "-l", "app=talk", "-p", "talk=9377/udp",
			"--", process.Program("backend"), "-udp", ":9377"))
	}
	run()
	for _, vip := range strings.Fields(c.kubectl("get", "svc", "talk", "-o", "jsonpath={.spec.clusterIPs[0]} {.spec.clusterIPs[1]}")) {
		conn, err := c.node.Dial(t.Context(), svc.UDP, netip.AddrPortFrom(netip.MustParseAddr(vip), 5300))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ask := func() (string, error) {
			if err := conn.SetDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
				return "", err
			}
			if _, err := conn.Write([]byte("?")); err != nil {
				return "", err
			}
			buf := make([]byte, 200)
			n, err := conn.Read(buf)
			return string(buf[:n]), err
		}
		answered := func() error {
			out, err := ask()
			if err == nil && !strings.HasPrefix(out, "talk-") {
				err = fmt.Errorf("answer %q", out)
			}
			return err
		}
		testbed.Until(c.t, "an answer from "+vip, answered)
		c.kubectl("delete", "pods", "-l", "app=talk")
		testbed.Until(c.t, "a refusal from "+vip, func() error {
			out, err := ask()
			if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EPERM) {
				return fmt.Errorf("answer %q, %v", out, err)
			}
			return nil
		})
		run()
		testbed.Until(c.t, "an answer from the new Pod through "+vip, answered)
	}
}
