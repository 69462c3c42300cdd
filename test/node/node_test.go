// Package node runs servers and agents as processes on hosts of the testbed and
// does to them what happens to processes: they are killed, restarted, removed.
package node

import (
	"bytes"
	"context"
	"errors"
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
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// binaries is the directory of the binaries, which make test names.
func binaries(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("FAIRLEAD_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	for where, pkgs := range map[string][]string{"../..": {"./cmd/fairlead", "./examples/backend"}, "../kubectl": {"."}} {
		cmd := exec.Command("go", append([]string{"build", "-o", dir + "/"}, pkgs...)...)
		cmd.Dir, cmd.Env = where, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build: %v\n%s", err, out)
		}
	}
	return dir
}

// cluster is one server and one agent on a host each.
type cluster struct {
	t            *testing.T
	bin, dir     string
	network      *testbed.Network
	server, node *testbed.Host
	agent        *exec.Cmd
	agentLog     *output
	// agentFlags are further flags for agents.
	agentFlags []string
}

// output collects what a process writes, for others to read meanwhile.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func newCluster(t *testing.T, agentFlags ...string) *cluster {
	t.Helper()
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, bin: binaries(t), dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node"), agentLog: &output{}, agentFlags: agentFlags}
	c.node.Sysctl("net/ipv4/ip_forward", "1")
	cmd := c.fairlead(c.server, "server", "--data-dir", c.path("server"), "--bind-address", "127.0.0.1,"+c.server.Addr4().String())
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the server ended with %v\n%s", err, log.String())
		}
	})
	c.until("the server to be ready", func() error { return c.kubectlErr("get", "--raw", "/readyz") })
	c.startAgent()
	t.Cleanup(func() {
		c.stopAgent(syscall.SIGTERM)
		if out, err := c.fairlead(c.node, "cleanup", "--data-dir", c.path("agent")).CombinedOutput(); err != nil {
			t.Errorf("fairlead cleanup: %v\n%s", err, out)
		}
	})
	c.until("the node to be Ready", func() error {
		if out := c.kubectl("get", "nodes"); !strings.Contains(out, " Ready ") {
			return errors.New(out)
		}
		return nil
	})
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) fairlead(on *testbed.Host, args ...string) *exec.Cmd {
	cmd := on.Command(context.WithoutCancel(c.t.Context()), filepath.Join(c.bin, "fairlead"), args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.path("server/admin.kubeconfig"))
	return cmd
}

func (c *cluster) startAgent() {
	c.t.Helper()
	c.agentLog = &output{}
	c.agent = c.agentOn(c.node, "agent", c.agentLog)
}

// agentOn starts an agent on a host, whose name is the node's; its state is in a
// directory of the cluster's.
func (c *cluster) agentOn(on *testbed.Host, dir string, log io.Writer, flags ...string) *exec.Cmd {
	c.t.Helper()
	token, err := os.ReadFile(c.path("server/node-token"))
	if err != nil {
		c.t.Fatal(err)
	}
	args := []string{"agent", "--server", "https://" + c.server.Addr4().String() + ":6443", "--token", strings.TrimSpace(string(token)),
		"--node-name", on.Name(), "--node-ip", on.Addr4().String(), "--data-dir", c.path(dir)}
	cmd := c.fairlead(on, slices.Concat(args, c.agentFlags, flags)...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	return cmd
}

// stopAgent ends the agent and waits for it.
func (c *cluster) stopAgent(how syscall.Signal) {
	c.t.Helper()
	if c.agent == nil {
		return
	}
	c.agent.Process.Signal(how)
	c.agentEnds(how)
}

// agentEnds waits for an agent that was signalled.
func (c *cluster) agentEnds(how syscall.Signal) {
	c.t.Helper()
	err := c.agent.Wait()
	if how == syscall.SIGTERM && err != nil {
		c.t.Errorf("the agent ended with %v\n%s", err, c.agentLog.String())
	}
	c.agent = nil
}

// kubectl runs on the server's host and must succeed.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.run(args...)
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (c *cluster) kubectlErr(args ...string) error {
	out, err := c.run(args...)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return err
}

func (c *cluster) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	cmd := c.server.Command(ctx, filepath.Join(c.bin, "kubectl"), args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.path("server/admin.kubeconfig"))
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (c *cluster) until(what string, check func() error) {
	c.t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("waited for %s: %v\nagent:\n%s", what, err, c.agentLog.String())
		}
		<-tick.C
	}
}

// backends runs two Pods behind my-service and returns its ClusterIP.
func (c *cluster) backends() netip.AddrPort {
	c.t.Helper()
	run := c.fairlead(c.server, "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", "2", "--ready", "http://:9376/healthz",
		"--", filepath.Join(c.bin, "backend"))
	if out, err := run.CombinedOutput(); err != nil {
		c.t.Fatalf("fairlead run: %v\n%s\nagent:\n%s", err, out, c.agentLog.String())
	}
	c.kubectl("apply", "-f", "../../examples/my-service.yaml")
	ip := netip.MustParseAddr(c.kubectl("get", "svc", "my-service", "-o", "jsonpath={.spec.clusterIP}"))
	at := netip.AddrPortFrom(ip, 80)
	c.until("an answer", func() error { return c.ask(at) })
	return at
}

// ask makes one request from the node, on a connection of its own.
func (c *cluster) ask(at netip.AddrPort) error {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.node.Dial(ctx, svc.TCP, at)
		},
	}}
	answer, err := client.Get("http://my-service/")
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.ReadAll(answer.Body)
	return err
}

// started says, a line for each Pod, how often and when its container was
// started.
func (c *cluster) started() string {
	c.t.Helper()
	return c.kubectl("get", "pods", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].state.running.startedAt} {.status.podIP}{\"\\n\"}{end}")
}

// A killed agent takes nothing with it: connections to Services go on being
// answered (behaviour 50), its Pods live on, and the next agent finds both.
func TestKilledAgent(t *testing.T) {
	c := newCluster(t)
	at := c.backends()
	before := c.started()

	var asked, failed atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if err := c.ask(at); err != nil && ctx.Err() == nil {
				failed.Add(1)
				t.Logf("request %d: %v", asked.Load(), err)
			}
			asked.Add(1)
		}
	}()
	answered := func(n int64) {
		t.Helper()
		goal := asked.Load() + n
		c.until("more answers", func() error {
			if asked.Load() < goal {
				return fmt.Errorf("%d of %d", asked.Load(), goal)
			}
			return nil
		})
	}
	answered(50)
	c.stopAgent(syscall.SIGKILL)
	answered(200)
	c.startAgent()
	c.until("the new agent to say that services are programmed", func() error {
		if !strings.Contains(c.agentLog.String(), "is up") {
			return errors.New(c.agentLog.String())
		}
		return nil
	})
	answered(200)
	cancel()
	<-done
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed while the agent was killed and started again", failed.Load(), asked.Load())
	}
	if after := c.started(); after != before {
		t.Errorf("the Pods were not left alone:\nbefore\n%s\nafter\n%s", before, after)
	}
	if strings.Count(c.agentLog.String(), "pod found again") != 2 {
		t.Errorf("the agent did not find its Pods again:\n%s", c.agentLog.String())
	}
	if out := c.kubectl("exec", strings.Fields(before)[0], "--", "hostname"); out != strings.Fields(before)[0] {
		t.Errorf("exec into a Pod that was found again printed %q", out)
	}
}

// fairlead cleanup leaves no rule, set, device, route, process or state behind,
// whichever modes the node was in.
func TestCleanupLeavesNothing(t *testing.T) {
	c := newCluster(t)
	traces := func() string {
		t.Helper()
		var all strings.Builder
		for _, args := range [][]string{{"nft", "list", "ruleset"}, {"ip", "-o", "link"}, {"ip", "route"}, {"ip", "-6", "route", "show", "proto", "250"}} {
			out, err := c.node.Command(t.Context(), args[0], args[1:]...).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %v\n%s", args, err, out)
			}
			all.Write(out)
		}
		c.node.Do(func() {
			sets, err := ipset.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer sets.Close()
			names, err := sets.Names()
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&all, "sets %q\n", names)
		})
		return all.String()
	}
	c.backends()
	c.lostIsTold()
	if now := traces(); !strings.Contains(now, `"fairlead-iptables-dropped-6"`) || !strings.Contains(now, "FAIRLEAD-SERVICES") || !strings.Contains(now, "fl0") {
		t.Fatalf("an agent at work leaves no trace that this test could miss:\n%s", now)
	}
	c.stopAgent(syscall.SIGTERM)
	if out, err := c.fairlead(c.node, "cleanup", "--data-dir", c.path("agent")).CombinedOutput(); err != nil {
		t.Fatalf("fairlead cleanup: %v\n%s", err, out)
	}
	now := traces()
	for _, trace := range []string{"fairlead", "FAIRLEAD", "fl0", "veth", "proto 250"} {
		if strings.Contains(now, trace) {
			t.Errorf("cleanup left %q:\n%s", trace, now)
		}
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
	c := newCluster(t)
	c.backends()
	pod := strings.Fields(c.started())[0]
	if out := c.kubectl("logs", pod); out != "listening on :9376" {
		t.Errorf("kubectl logs printed %q", out)
	}
	if err := c.kubectlErr("exec", pod, "--", "sh", "-c", "exit 3"); err == nil || !strings.Contains(err.Error(), "exit code 3") {
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
	if out := c.kubectl("exec", pod, "--", "env", "HOME=/nonexistent", filepath.Join(c.bin, "kubectl"), "auth", "whoami"); !strings.Contains(out, "system:serviceaccount:default:default") || !strings.Contains(out, pod) {
		t.Errorf("the Pod is %q", out)
	}
	// So does fairlead, and is no more than the Pod's service account.
	env := []string{"exec", pod, "--", filepath.Join(c.bin, "fairlead"), "env", "-n", "default"}
	if out, err := c.run(env...); err == nil || !strings.Contains(out, `"system:serviceaccount:default:default" cannot`) {
		t.Errorf("without any right: %v, %q", err, out)
	}
	c.kubectl("create", "rolebinding", "reader", "--clusterrole=view", "--serviceaccount=default:default")
	if out := c.kubectl(env...); !strings.Contains(out, "KUBERNETES_SERVICE_HOST=10.96.0.1") {
		t.Errorf("fairlead env in the Pod says %q", out)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	forward := c.server.Command(ctx, filepath.Join(c.bin, "kubectl"), "port-forward", pod, "19376:9376")
	forward.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.path("server/admin.kubeconfig"))
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	c.until("an answer through the forwarded port", func() error {
		out, err := c.server.Command(t.Context(), "curl", "-sS", "--max-time", "5", "http://127.0.0.1:19376/").CombinedOutput()
		if err == nil && !strings.HasPrefix(string(out), pod) {
			err = fmt.Errorf("answer %q", out)
		}
		return err
	})
	cancel()
	_ = forward.Wait() // ended by us
}

// A UDP client that keeps its socket is not left with a connection tracking entry
// to a Pod that is gone: it is refused when the last one goes, and answered again,
// on the same socket, when there is a new one (kubernetes/kubernetes#139628). The
// whole over IPv6 as well.
func TestUDPFlowsFollowTheEndpoints(t *testing.T) {
	c := newCluster(t)
	c.kubectl("create", "-f", "testdata/udp.yaml")
	run := func() {
		t.Helper()
		cmd := c.fairlead(c.server, "run", "-d", "-l", "app=talk", "-p", "talk=9377/udp", "--", filepath.Join(c.bin, "backend"), "-udp", ":9377")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("fairlead run: %v\n%s", err, out)
		}
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
		c.until("an answer from "+vip, answered)
		c.kubectl("delete", "pods", "-l", "app=talk")
		c.until("a refusal from "+vip, func() error {
			out, err := ask()
			if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EPERM) {
				return fmt.Errorf("answer %q, %v", out, err)
			}
			return nil
		})
		run()
		c.until("an answer from the new Pod through "+vip, answered)
	}
}
