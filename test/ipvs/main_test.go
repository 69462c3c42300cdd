// Package ipvs runs the whole proxy in mode ipvs as its users do: fairlead server
// and fairlead proxy are processes, inside a kernel that has IPVS.
package ipvs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

func TestMain(m *testing.M) { uml.Main(m, bring) }

// program is the binary, inside the guest.
const program = uml.Shared + "/fairlead"

// bring puts the binary into dir: that of $FAIRLEAD_BIN, which make test sets, or
// one that is built now.
func bring(dir string) error {
	to := filepath.Join(dir, filepath.Base(program))
	bin := os.Getenv("FAIRLEAD_BIN")
	if bin == "" {
		cmd := exec.CommandContext(context.Background(), "go", "build", "-o", to, "./cmd/fairlead")
		cmd.Dir, cmd.Stderr, cmd.Env = filepath.Join("..", ".."), os.Stderr, append(os.Environ(), "CGO_ENABLED=0")
		return cmd.Run()
	}
	from := filepath.Join(bin, filepath.Base(program))
	if os.Link(from, to) == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// patience is how long anything may take on a slow machine.
const patience = 2 * time.Minute

// until polls check until it is nil; its last error fails the test.
func until(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s: %v", patience, what, err)
		}
		<-tick.C
	}
}

// log collects what a process writes, for others to read meanwhile.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// cluster is a node with an API server of its own.
type cluster struct {
	t      *testing.T
	dir    string
	node   *testbed.Host
	client kubernetes.Interface
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), node: testbed.NewNetwork(t).Host("node")}
	_, stop := c.start("server", "--data-dir", c.path("server"), "--controllers", "none")
	t.Cleanup(stop)
	until(t, "the server's kubeconfig", func() error {
		_, err := os.Stat(c.kubeconfig())
		return err
	})
	cfg, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	cfg.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		c.node.Do(func() { conn, err = (&net.Dialer{}).DialContext(ctx, network, address) })
		return conn, err
	}
	if c.client, err = kubernetes.NewForConfig(cfg); err != nil {
		t.Fatal(err)
	}
	until(t, "the server to be ready", func() error {
		return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(t.Context()).Error()
	})
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) kubeconfig() string { return c.path("server/admin.kubeconfig") }

// command is fairlead on the node.
func (c *cluster) command(args ...string) *exec.Cmd {
	cmd := c.node.Command(context.WithoutCancel(c.t.Context()), program, args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	return cmd
}

// start runs fairlead until stop, which it must obey, and well.
func (c *cluster) start(args ...string) (out *log, stop func()) {
	c.t.Helper()
	cmd := c.command(args...)
	out = &log{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return out, sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-ended:
			if err != nil {
				c.t.Errorf("fairlead %s ended with %v", args[0], err)
			}
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			c.t.Errorf("fairlead %s did not end", args[0])
		}
		if c.t.Failed() {
			c.t.Logf("fairlead %s said\n%s", strings.Join(args, " "), out)
		}
	})
}

// run runs fairlead to its end, and returns its exit code and what it said.
func (c *cluster) run(cmd *exec.Cmd) (code int, said string) {
	c.t.Helper()
	timer := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		c.t.Fatalf("%s: %v", strings.Join(cmd.Args, " "), err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// proxy are the arguments of a proxy on the node in mode ipvs.
func (c *cluster) proxy(more ...string) []string {
	return append([]string{"proxy", "--mode", "ipvs", "--kubeconfig", c.kubeconfig(), "--node-name", "node",
		"--iptables-variant", "legacy", "--service-cluster-ip-range", "10.96.0.0/16"}, more...)
}

// on runs a command on the node that must succeed.
func (c *cluster) on(args ...string) string {
	c.t.Helper()
	out, err := c.node.Command(c.t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// inKernel is all that mode ipvs could write, as text: virtual servers, sets,
// addresses, rules.
func (c *cluster) inKernel() string {
	c.t.Helper()
	var b strings.Builder
	c.node.Do(func() { readKernel(c.t, &b) })
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		for line := range strings.Lines(c.on(program)) {
			if strings.HasPrefix(line, "-A") || strings.Contains(line, "FAIRLEAD") {
				b.WriteString(line)
			}
		}
	}
	fmt.Fprint(&b, c.on("ip", "-oneline", "address"))
	return b.String()
}
