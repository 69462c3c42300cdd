package reliability

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

func TestMain(m *testing.M) {
	flag.Parse()
	process.Main(func() int { return testbed.Run(m) }, "fairlead", "backend")
}

const (
	serverCount = 3
	nodeCount   = 5
)

// server is a fairlead server with an embedded etcd, on its own machine.
type server struct {
	*process.Server
	host *testbed.Host
	dir  string
}

func (s *server) url() string { return "https://" + s.host.Addr4().String() + ":6443" }

// node is a machine with an agent and a Pod of the Service.
type node struct {
	host  *testbed.Host
	agent *process.Process
	dir   string

	mu  sync.Mutex
	pod *os.File // the network namespace of its Pod
}

// namespace is the file of the Pod's network namespace.
func (n *node) namespace() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return fmt.Sprintf("/proc/self/fd/%d", n.pod.Fd())
}

// enters opens the network namespace of the Pod that runs now. It stays there until the test
// ends, whatever becomes of the Pod.
func (n *node) enters(t *testing.T) error {
	pid, err := n.backend()
	if err != nil {
		return err
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pod != nil && sameFile(n.pod, f) {
		return f.Close()
	}
	t.Cleanup(func() { _ = f.Close() })
	n.pod = f
	return nil
}

func sameFile(a, b *os.File) bool {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

// podOn is the name of the Pod of a machine.
func podOn(n *node) string { return "on-" + n.host.Name() }

// backend returns the process of the Pod.
func (n *node) backend() (int, error) {
	for _, pid := range process.OfPods(filepath.Join(n.dir, "agent")) {
		if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); filepath.Base(exe) == "backend" {
			return pid, nil
		}
	}
	return 0, errors.New("no backend runs on " + n.host.Name())
}

// rig is the cluster.
type rig struct {
	t       *testing.T
	network *testbed.Network
	servers []*server
	nodes   []*node
	outside *testbed.Host
	stopped bool
	// service is the ClusterIP with its port; nodePort is the port at each node.
	service  netip.AddrPort
	nodePort uint16
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, network: testbed.NewNetwork(t)}
	r.outside = r.network.Outside("outside")
	for i := range serverCount {
		r.addServer(fmt.Sprintf("server%d", i+1))
	}
	for i := range nodeCount {
		host := r.network.Outside(fmt.Sprintf("node%d", i+1))
		host.Sysctl("net/ipv4/ip_forward", "1")
		n := &node{host: host, dir: filepath.Join(t.TempDir(), host.Name())}
		r.nodes = append(r.nodes, n)
		r.startAgent(n)
	}
	t.Cleanup(r.stop)
	r.runPods()
	testbed.Until(t, "all servers and nodes", r.whole)
	testbed.Until(t, "each node to balance over all Pods", r.balanced())
	return r
}

// stop ends all processes at a time, and cleans up after them.
// stop ends everything, once. Each process would end by itself at the test's end, but one after the other.
func (r *rig) stop() {
	if r.stopped {
		return
	}
	r.stopped = true
	var wg sync.WaitGroup
	for _, n := range r.nodes {
		wg.Go(func() {
			n.agent.Stop()
			if out, err := process.Try(r.fairlead(n.host, "cleanup", "--data-dir", n.dir)); err != nil {
				r.t.Errorf("%s: %v\n%s", n.host.Name(), err, out)
			}
		})
	}
	wg.Wait()
	for _, s := range r.servers {
		wg.Go(s.Process.Stop)
	}
	wg.Wait()
}

// addServer starts a server, which joins the first one.
func (r *rig) addServer(name string) {
	r.t.Helper()
	s := &server{host: r.network.Outside(name), dir: filepath.Join(r.t.TempDir(), name)}
	flags := []string{"--bind-address", "127.0.0.1," + s.host.Addr4().String(), "--server-name", name, "--cluster-init"}
	if len(r.servers) > 0 {
		first := r.servers[0]
		file := filepath.Join(r.t.TempDir(), "token")
		token := process.Output(r.t, r.fairlead(first.host, "token", "create", "--server", "--data-dir", first.dir))
		if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
			r.t.Fatal(err)
		}
		flags = append(flags[:len(flags)-1], "--join", first.url(), "--token-file", file)
	}
	s.Server = process.NewServer(s.host, process.Program("fairlead"), s.dir, flags...)
	s.Start(r.t)
	s.AwaitReady(r.t)
	s.Says("add a node") // all its parts are ready, also those in which another server leads
	r.servers = append(r.servers, s)
}

// fairlead is a command on a machine, of an administrator at the first server.
func (r *rig) fairlead(on *testbed.Host, args ...string) (cmd *exec.Cmd) {
	cmd = on.Command(context.Background(), process.Program("fairlead"), args...)
	cmd.Env = append(os.Environ(), "HOME="+r.t.TempDir(), "KUBECONFIG=")
	if len(r.servers) > 0 {
		cmd.Env = append(cmd.Env, "KUBECONFIG="+r.servers[0].Kubeconfig)
	}
	return cmd
}

func (r *rig) startAgent(n *node) {
	r.t.Helper()
	token, err := os.ReadFile(filepath.Join(r.servers[0].dir, "node-token"))
	if err != nil {
		r.t.Fatal(err)
	}
	n.agent = process.Start(r.t, r.fairlead(n.host, "agent", "--server", r.servers[0].url(), "--token", strings.TrimSpace(string(token)),
		"--node-name", n.host.Name(), "--node-ip", n.host.Addr4().String(), "--data-dir", n.dir, "--dns-lameduck", "1s"))
}

// runPods runs a Pod of the Service on each node.
func (r *rig) runPods() {
	r.t.Helper()
	ctx, client := r.t.Context(), r.servers[0].Client.CoreV1()
	for _, n := range r.nodes {
		probe := corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(9376)}}
		_, err := client.Pods("default").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: podOn(n), Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{NodeName: n.host.Name(), Containers: []corev1.Container{{
				Name: "web", Image: "host", Command: []string{process.Program("backend")},
				ReadinessProbe: &corev1.Probe{ProbeHandler: probe, PeriodSeconds: 1},
			}}},
		}, metav1.CreateOptions{})
		if err != nil {
			r.t.Fatal(err)
		}
	}
	made, err := client.Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{
			{Port: 80, TargetPort: intstr.FromInt32(9376)},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.service = netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
	r.nodePort = uint16(made.Spec.Ports[0].NodePort)
}

// whole returns an error unless all servers are ready and all nodes and Pods are. It learns
// the network namespaces of the Pods.
func (r *rig) whole() error {
	for _, s := range r.servers {
		if err := s.Ready(r.t.Context()); err != nil {
			return fmt.Errorf("%s: %w", s.host.Name(), err)
		}
	}
	client := r.servers[0].Client.CoreV1()
	nodes, err := client.Nodes().List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range nodes.Items {
		if i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady }); i < 0 ||
			n.Status.Conditions[i].Status != corev1.ConditionTrue {
			return fmt.Errorf("%s is not Ready", n.Name)
		}
	}
	pods, err := client.Pods("default").List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if i := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady }); i < 0 ||
			p.Status.Conditions[i].Status != corev1.ConditionTrue {
			return fmt.Errorf("%s is not ready", p.Name)
		}
	}
	if len(nodes.Items) != nodeCount || len(pods.Items) != nodeCount {
		return fmt.Errorf("%d nodes and %d Pods", len(nodes.Items), len(pods.Items))
	}
	for _, n := range r.nodes {
		if err := n.enters(r.t); err != nil {
			return err
		}
	}
	return nil
}

// dialFrom returns what opens connections to the Service from a node.
func (r *rig) dialFrom(n *node) dialer {
	return func(ctx context.Context) (net.Conn, error) { return n.host.Dial(ctx, svc.TCP, r.service) }
}

// balanced returns a check that each node has had an answer from every Pod: one that is Ready in
// the API gets connections only when the planes have its endpoint.
func (r *rig) balanced() func() error {
	answered := map[*node]map[*node]bool{}
	for _, n := range r.nodes {
		answered[n] = map[*node]bool{}
	}
	return func() (err error) {
		for n, by := range answered {
			if len(by) == nodeCount {
				continue
			}
			answer, failed := ask(r.t.Context(), r.dialFrom(n))
			if failed != nil {
				return fmt.Errorf("%s: %w", n.host.Name(), failed)
			}
			if by[r.nodeOf(answer)] = true; len(by) < nodeCount {
				err = fmt.Errorf("%s had answers of %d of %d Pods", n.host.Name(), len(by), nodeCount)
			}
		}
		return err
	}
}

// deafen has a machine get nothing of what others send, until the returned function is called.
func (r *rig) deafen(h *testbed.Host, others ...*testbed.Host) (mend func()) {
	r.t.Helper()
	var from []string
	for _, o := range others {
		// In /sys is what the mount belongs to, not the caller.
		_, link, _ := strings.Cut(process.Output(r.t, o.Command(context.Background(), "ip", "-o", "link", "show", "eth0")), "link/ether ")
		from = append(from, strings.Fields(link)[0])
	}
	return r.loses(h, "ether saddr { "+strings.Join(from, ", ")+" }")
}

// loses has a machine lose the packets to it that match, until the returned function is called.
func (r *rig) loses(h *testbed.Host, match string) (mend func()) {
	r.t.Helper()
	r.nft(h, "add table inet deaf; add chain inet deaf c { type filter hook prerouting priority -400; }; "+
		"add rule inet deaf c "+match+" drop")
	return func() { r.nft(h, "add table inet deaf; delete table inet deaf") } // a machine that was off has none
}

func (r *rig) nft(h *testbed.Host, command string) {
	r.t.Helper()
	process.Output(r.t, h.Command(context.Background(), "nft", command))
}

// powerOff has a machine end in mid-sentence: its processes are gone and it sends nothing.
func (r *rig) powerOff(n *node) (powerOn func()) {
	r.t.Helper()
	r.nft(n.host, "add table inet off; add chain inet off in { type filter hook prerouting priority -400; policy drop; }; "+
		"add chain inet off out { type filter hook postrouting priority -400; policy drop; }")
	n.agent.Kill()
	for _, pid := range process.OfPods(filepath.Join(n.dir, "agent")) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return func() {
		process.Output(r.t, n.host.Command(context.Background(), "sh", "-c", `nft flush ruleset
			ip -o link show | sed 's/^[0-9]*: \([^:@]*\).*/\1/' | grep -v -e '^lo$' -e '^eth0$' |
				while read l; do ip link del "$l" || :; done # some are gone with others`))
		r.startAgent(n)
	}
}

// leader returns the server whose etcd leads.
func (r *rig) leader() *server {
	r.t.Helper()
	var all []members.Member
	testbed.Until(r.t, "a leader of etcd", func() error {
		out, err := r.servers[0].Client.RESTClient().Get().AbsPath(members.Path).Timeout(5 * time.Second).Do(r.t.Context()).Raw()
		if err == nil {
			err = json.Unmarshal(out, &all)
		}
		if err == nil && !slices.ContainsFunc(all, isLeader) {
			err = fmt.Errorf("none among %+v", all)
		}
		return err
	})
	name := all[slices.IndexFunc(all, isLeader)].Name
	return r.servers[slices.IndexFunc(r.servers, func(s *server) bool { return s.host.Name() == name })]
}

func isLeader(m members.Member) bool { return m.Role == members.RoleLeader }
