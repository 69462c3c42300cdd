package node

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// upgrade is a server and two nodes that are upgraded one after the other.
type upgrade struct {
	*cluster
	hosts  []*testbed.Host
	agents []*process.Process
}

// agentOf starts an agent of that program on a node, in place of the one that is there.
func (u *upgrade) agentOf(program string, node int) {
	u.t.Helper()
	if u.agents[node] != nil {
		u.agents[node].Stop()
	}
	host := u.hosts[node]
	u.agents[node] = process.Start(u.t, u.on(host, program, u.agentArgs(host, host.Name())...))
	u.agents[node].Says("is up")
}

// serverOf starts a server of that program on the data that is there.
func (u *upgrade) serverOf(program string) {
	u.t.Helper()
	if u.api != nil {
		u.api.Stop()
	}
	u.api = process.NewServer(u.server, program, u.path("server"), "--bind-address", "127.0.0.1,"+u.server.Addr4().String())
	u.api.Start(u.t)
	u.api.AwaitReady(u.t)
}

// serves wants that what is made now is served on both nodes.
func (u *upgrade) serves(name string) {
	u.t.Helper()
	u.nodesReady(2)
	u.kubectl("create", "service", "clusterip", name, "--tcp=80:9376")
	u.kubectl("patch", "service", name, "--type=merge", "-p", `{"spec":{"selector":{"app":"MyApp"}}}`)
	at := netip.AddrPortFrom(netip.MustParseAddr(u.kubectl("get", "svc", name, "-o", "jsonpath={.spec.clusterIP}")), 80)
	for _, h := range u.hosts {
		testbed.Until(u.t, name+" from "+h.Name(), func() error { return u.askFrom(h, at) })
	}
}

// versions are those of the nodes, in the order of their names.
func (u *upgrade) versions() []string {
	u.t.Helper()
	return strings.Fields(u.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"))
}

// An upgrade from the version before, one process after the other, under connections to a Service from both nodes: none
// is lost, Pods keep their processes, and what is made in between reaches new agents of an old server and old agents of a
// new one. An agent rejects the state that a later version has written, and changes nothing.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	before, now := process.Previous(t), process.Program("fairlead")
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server")}
	u := &upgrade{cluster: c, agents: make([]*process.Process, 2)}
	u.serverOf(before)
	for i := range u.agents {
		host := network.Outside(fmt.Sprintf("node%d", i+1))
		host.Sysctl("net/ipv4/ip_forward", "1")
		u.cleansUp(host, host.Name())
		u.hosts = append(u.hosts, host)
		u.agentOf(before, i)
	}
	u.node = u.hosts[0]
	u.nodesReady(2)
	at := u.backends()
	u.serves("of-the-old-version")
	pods, started := u.podProcesses(), u.started()

	traffic := u.connect(10*time.Millisecond, target{u.hosts[0], svc.TCP, at}, target{u.hosts[1], svc.TCP, at})
	u.agentOf(now, 1)
	u.serves("new-agent-of-an-old-server")
	u.serverOf(now)
	u.serves("old-agent-of-a-new-server")
	if v := u.versions(); len(v) != 2 || v[0] == v[1] {
		t.Errorf("the nodes' versions are %q, want an old one and a new one", v)
	}
	u.agentOf(now, 0)
	u.serves("of-the-new-version")
	traffic.cancel()
	traffic.wg.Wait()

	if len(traffic.lost) > 0 || traffic.made == 0 {
		t.Errorf("%d of %d connections were lost: %v", len(traffic.lost), traffic.made, traffic.lost)
	}
	t.Logf("%d connections", traffic.made)
	if after := u.podProcesses(); !slices.Equal(after, pods) {
		t.Errorf("the Pods' processes were %v and are %v", pods, after)
	}
	if after := u.started(); after != started {
		t.Errorf("the Pods were\n%s\nand are\n%s", started, after)
	}
	u.rejectsLaterState()
}

// podProcesses are the processes of both nodes' Pods.
func (u *upgrade) podProcesses() []int {
	u.t.Helper()
	var pids []int
	for _, h := range u.hosts {
		pids = append(pids, process.OfPods(u.path(h.Name()+"/agent"))...)
	}
	slices.Sort(pids)
	if pids = slices.Compact(pids); len(pids) < 4 { // each has one of its own and a shim
		u.t.Fatalf("the Pods' processes are %v", pids)
	}
	return pids
}

// rejectsLaterState has a node's state and the server's data be those of a version to come.
func (u *upgrade) rejectsLaterState() {
	t := u.t
	t.Helper()
	u.agents[0].Stop()
	u.api.Stop()
	host, state := u.hosts[0], u.path(u.hosts[0].Name()+"/agent")
	for dir, args := range map[string][]string{
		state:            u.agentArgs(host, host.Name()),
		u.path("server"): {"server", "--data-dir", u.path("server")},
	} {
		file := filepath.Join(dir, "version")
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(file, []byte("1000\n"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		files := u.files(dir)
		out, err := process.Try(u.fairlead(host, args...))
		if want := "the data directory " + dir + " was written by a newer fairlead (layout 1000,"; err == nil || !strings.Contains(out, want) {
			t.Errorf("fairlead %s: %v, %q, want %q", args[0], err, out, want)
		}
		if after := u.files(dir); after != files {
			t.Errorf("fairlead %s has changed what it rejected:\n%s\nbefore\n%s", args[0], after, files)
		}
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	u.api.Start(t)
	u.api.AwaitReady(t)
	u.agentOf(process.Program("fairlead"), 0)
	u.serves("after-the-rejected-starts")
}

// files has a line for each file below dir that no running process writes: its name, size, and when it was written.
func (u *upgrade) files(dir string) string {
	return process.Output(u.t, u.on(u.server, "sh", "-c", "cd "+dir+
		` && find . -type f ! -name lock ! -name '*.log*' -printf '%p %s %T@\n' | sort`))
}
