package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// plainText is in what Pods send in the tests of encryption.
const plainText = "not to be read between the nodes"

// encrypted is a cluster of two nodes with a router between, whose agents encrypt, and a Pod
// on each.
type encrypted struct {
	*cluster
	far          *testbed.Host
	near, behind wireguard
	// from is the name of the Pod on node, there are the addresses of the one on far.
	from  string
	there []string
}

// newEncrypted returns one whose nodes have addresses of a family alone.
func newEncrypted(t *testing.T, f svc.Family) *encrypted {
	c := newServer(t, nil, nil)
	e := &encrypted{cluster: c, far: c.network.Far("far")}
	e.far.Sysctl("net/ipv4/ip_forward", "1")
	flags := func(h *testbed.Host) []string { return []string{"--node-ip", h.Addr(f).String()} }
	e.near, e.behind = c.wireguard(c.node, "agent", flags(c.node)), c.wireguard(e.far, "far", flags(e.far))
	c.cleansUp(c.node, "agent")
	c.cleansUp(e.far, "far")
	e.near.agent("--encrypt")
	e.behind.agent("--encrypt")
	c.nodesReady(2)
	for name, node := range map[string]string{"near": "node", "there": "far"} {
		process.Output(t, c.fairlead(c.server, "run", "-d", "--name", name, "-l", "app="+name, "-p", "http=9376", "--node", node,
			"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	}
	c.kubectl("create", "service", "clusterip", "there", "--tcp=80:9376")
	testbed.Until(t, "the Pods", func() error {
		out, err := c.try("get", "pods", "-l", "app in (near, there)", "--sort-by=.metadata.labels.app",
			"-o", "jsonpath={.items[0].metadata.name} {.items[1].status.podIPs[*].ip}")
		if fields := strings.Fields(out); err == nil && len(fields) == 3 {
			e.from, e.there = fields[0], fields[1:]
			return nil
		}
		return errors.Join(err, errors.New(out))
	})
	return e
}

// pods are the ranges of Pods of both families.
func pods() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
}

// wire is what passes the interface of node from now on.
func (e *encrypted) wire() *testbed.Wire { return e.node.Wire(plainText, pods(), 51820) }

// errNoAnswer is the error of a request that was sent.
var errNoAnswer = errors.New("no answer")

// ask sends a body from the Pod on node, which has so many seconds to be answered.
func (e *encrypted) ask(at string, body, seconds int) error {
	out, err := e.try("exec", e.from, "--", "sh", "-c", fmt.Sprintf(
		"(echo %s; head -c %d /dev/zero) | curl -sS --max-time %d --data-binary @- http://%s; echo curl: $?", plainText, body, seconds, at))
	switch {
	case err != nil:
		return err
	case !strings.Contains(out, "curl: 0"):
		return fmt.Errorf("%w: %s", errNoAnswer, out)
	}
	return nil
}

// closed waits until the Pod on far does not answer that on node any more.
func (e *encrypted) closed(what string) {
	e.t.Helper()
	for _, ip := range e.there {
		testbed.Until(e.t, "the end of answers with "+what, func() error {
			if err := e.ask(at(ip), 0, 2); !errors.Is(err, errNoAnswer) {
				return fmt.Errorf("it answers, or has not been asked: %w", err)
			}
			return nil
		})
	}
}

// open waits until it answers at the addresses.
func (e *encrypted) open(what string, ips []string) {
	e.t.Helper()
	for _, ip := range ips {
		testbed.Until(e.t, "an answer "+what, func() error { return e.ask(at(ip), 0, 5) })
	}
}

// at is the address of the program in a Pod.
func at(ip string) string { return netip.AddrPortFrom(netip.MustParseAddr(ip), 9376).String() }

// With --encrypt what Pods send to Pods of another node cannot be read between them: of the
// wire all frames are read. A node with another key than the API has of it, or without one,
// gets nothing, and a new key is followed.
func TestEncrypt(t *testing.T) {
	t.Parallel()
	e := newEncrypted(t, svc.IPv4)
	wire := e.wire()
	e.answers()

	// The other node's key is replaced by that of an unknown machine, and then removed.
	e.behind.running.Stop()
	other, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	old := e.key("far")
	e.kubectl("annotate", "--overwrite", "node", "far", svc.PublicKeyAnnotation+"="+other.PublicKey().String())
	e.closed("another key")
	e.kubectl("annotate", "node", "far", svc.PublicKeyAnnotation+"-")
	e.podsRouted("node", "no public key of WireGuard")
	e.closed("no key")
	if err := os.Remove(e.path("far/agent/wireguard.key")); err != nil {
		t.Fatal(err)
	}
	e.behind.agent("--encrypt")
	e.open("with a new key", e.there)
	if now := e.key("far"); now == old {
		t.Error("the key is the old one")
	}
	e.podsRouted("node", "")
	e.deviceDies()
	e.copied()
	if err := wire.Check(true, 20); err != nil {
		t.Error(err)
	}
}

// deviceDies ends the other node's userspace WireGuard, if that is what it has: its agent reports the node, and its Pod, as
// not ready, until there is a device again.
func (e *encrypted) deviceDies() {
	e.t.Helper()
	if e.behind.userspace == nil {
		return
	}
	ready := func() (string, error) {
		return e.try("get", "endpointslices", "-l", "kubernetes.io/service-name=there",
			"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
	}
	await := func(what, want string) {
		e.t.Helper()
		testbed.Until(e.t, what, func() error {
			out, err := ready()
			if err == nil && !strings.HasPrefix(out, want) {
				err = fmt.Errorf("ready: %s", out)
			}
			return err
		})
	}
	await("the endpoint", "true")
	begin := time.Now()
	e.behind.userspace.Kill()
	await("the endpoint to leave", "false")
	e.t.Logf("the endpoints of a node without its device are out of service after %s", time.Since(begin))
	testbed.Until(e.t, "the reason, and the taint", func() error {
		out, err := e.try("get", "node", "far", "-o", "jsonpath={.spec.taints[*].key}")
		if err == nil && !strings.Contains(out, "node.kubernetes.io/not-ready") {
			err = errors.New("taints: " + out)
		}
		pod, podErr := e.try("get", "pods", "-l", "app=there", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].reason}")
		if podErr == nil && pod != svc.ReasonNodeNotReady {
			podErr = errors.New("the Pod is unready because of " + pod)
		}
		return errors.Join(err, podErr)
	})
	e.behind.startUserspace("nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", e.behind.running.Pid()), "--")
	await("the endpoint to return", "true")
	e.open("with the device again", e.there)
}

// copied has a machine start that is a copy of another one, with its key: it is told so, does
// not become a node, and leaves the other one alone, until it has its own key.
func (e *encrypted) copied() {
	e.t.Helper()
	host := e.network.Outside("copy")
	host.Sysctl("net/ipv4/ip_forward", "1")
	w := e.wireguard(host, "copy", []string{"--node-ip", host.Addr4().String()})
	e.cleansUp(host, "copy")
	const keyFile = "/agent/wireguard.key"
	key, err := os.ReadFile(e.path(e.behind.dir + keyFile))
	if err == nil {
		err = errors.Join(os.MkdirAll(e.path(w.dir+"/agent"), 0o700), os.WriteFile(e.path(w.dir+keyFile), key, 0o600))
	}
	if err != nil {
		e.t.Fatal(err)
	}
	w.agent("--encrypt")
	w.running.Says(`cannot update the Node.*metadata\.annotations\[fairlead\.dev/wireguard-public-key\].*is the key of node .*far`)
	e.open("of the machine that was copied", e.there)
	w.running.Stop()
	e.nodesReady(2)
	if err := os.Remove(e.path(w.dir + keyFile)); err != nil {
		e.t.Fatal(err)
	}
	w.agent("--encrypt")
	e.nodesReady(3)
	e.podsRouted("node", "")
}

// Nodes that have IPv6 addresses alone encrypt what goes to Pods of both families, and leave
// room in packets for a header of IPv6.
func TestEncryptIPv6(t *testing.T) {
	t.Parallel()
	e := newEncrypted(t, svc.IPv6)
	wire := e.wire()
	e.answers()
	e.podsRouted("node", "")
	out := process.Output(t, e.node.Command(t.Context(), "ip", "link", "show", link.WireGuardDevice))
	if !strings.Contains(out, " mtu 1420 ") {
		t.Errorf("the device has another MTU: %s", out)
	}
	if out = e.kubectl("exec", e.from, "--", "ip", "link", "show", "eth0"); !strings.Contains(out, " mtu 1420 ") {
		t.Errorf("a Pod has another MTU: %s", out)
	}
	if err := wire.Check(false, 20); err != nil {
		t.Error(err)
	}
}

// answers checks that the Pod on far, and its Service, answer the Pod on node, and node
// itself, whatever the size of what is sent.
func (e *encrypted) answers() {
	e.t.Helper()
	all := []string{e.kubectl("get", "svc", "there", "-o", "jsonpath={.spec.clusterIP}")}
	for _, ip := range e.there {
		all = append(all, at(ip))
	}
	for _, at := range all {
		testbed.Until(e.t, "an answer from "+at, func() error { return e.ask(at, 0, 5) })
		testbed.Until(e.t, "an answer to the node from "+at, func() error {
			_, err := process.Try(e.node.Command(e.t.Context(), "curl", "-sS", "--max-time", "5", "http://"+at))
			return err
		})
	}
	for _, ip := range e.there {
		if err := e.ask(at(ip), 200_000, 20); err != nil {
			e.t.Errorf("a body that is larger than any packet: %v", err)
		}
	}
}

func (c *cluster) key(node string) string {
	c.t.Helper()
	return c.kubectl("get", "node", node, "-o", `go-template={{index .metadata.annotations "`+svc.PublicKeyAnnotation+`"}}`)
}

// Encryption is switched off and on again node by node, while Pods run: a node with it and one
// without do not answer each other, and both say so; without it on both nothing of it is left.
func TestEncryptOffAndOn(t *testing.T) {
	t.Parallel()
	e := newEncrypted(t, svc.IPv4)
	e.open("with encryption", e.there)
	keys := map[string]string{"node": e.key("node"), "far": e.key("far")}

	e.near.running.Stop()
	e.near.agent()
	e.podsRouted("far", "node node: it has no public key of WireGuard")
	e.closed("encryption on the other node alone")
	e.behind.running.Stop()
	e.behind.agent()
	wire := e.wire()
	// Plain routes, and VXLAN beside them, lead to Pods of the families that nodes have.
	e.open("without encryption", e.there[:1])
	if wire.Check(true, 0) == nil {
		t.Error("nothing could be read of what was not encrypted: the wire is not read")
	}
	for node, w := range map[string]wireguard{"node": e.near, "far": e.behind} {
		if key := e.key(node); key != "<no value>" {
			t.Errorf("node %s still has the key %s", node, key)
		}
		if _, err := os.Stat(e.path(w.dir + "/agent/wireguard.key")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the private key of %s is left: %v", node, err)
		}
		e.leavesNothing(w)
	}

	e.behind.device()
	e.behind.running.Stop()
	e.behind.agent("--encrypt")
	e.podsRouted("far", "node node: it has no public key of WireGuard")
	e.closed("encryption on the other node alone, again")
	e.near.device()
	e.near.running.Stop()
	e.near.agent("--encrypt")
	e.open("with encryption again", e.there)
	e.podsRouted("node", "")
	e.podsRouted("far", "")
	for node, old := range keys {
		if e.key(node) == old {
			t.Errorf("node %s has its old key, which another could have taken meanwhile", node)
		}
	}
	wire = e.wire()
	e.answers()
	if err := wire.Check(true, 20); err != nil {
		t.Error(err)
	}
}

// leavesNothing waits until a node that does not encrypt has nothing of that in its kernel.
func (e *encrypted) leavesNothing(w wireguard) {
	e.t.Helper()
	testbed.Until(e.t, "the end of what encrypts", func() error {
		var left string
		for _, args := range [][]string{{"ip", "link"}, {"ip", "route", "show", "table", "all"}, {"ip", "-6", "route", "show", "table", "all"},
			{"nft", "list", "ruleset"}} {
			left += process.Output(e.t, w.host.Command(e.t.Context(), args[0], args[1:]...)) + "\n"
		}
		for _, what := range []string{link.WireGuardDevice, "fairlead-wireguard", "unreachable 10.244.0.0/16", "unreachable fd00:10:244::/56"} {
			if strings.Contains(left, what) {
				return fmt.Errorf("%q is left in\n%s", what, left)
			}
		}
		return nil
	})
}

// With --encrypt=preferred on the way, encryption is switched off and on again one node after the other, and every request between
// their Pods is answered.
func TestEncryptNodeByNode(t *testing.T) {
	t.Parallel()
	e := newEncrypted(t, svc.IPv4)
	e.open("with encryption", e.there)
	const loop = `i=0; while [ $i -lt 3000 ]; do i=$((i+1))
curl -sS -o /dev/null --max-time 5 http://%s || echo "request $i failed: $?"; [ $((i %% 20)) != 0 ] || echo "asked $i times"
sleep 0.05; done`
	process.Output(t, e.fairlead(e.server, "run", "-d", "--name", "asking", "-l", "app=asking", "--node", "node", "--",
		"/bin/sh", "-c", fmt.Sprintf(loop, at(e.there[0]))))
	asked := func() string { return e.kubectl("logs", "-l", "app=asking", "--tail=-1") }
	testbed.Until(t, "the first requests", func() error {
		if out := asked(); !strings.Contains(out, "asked") {
			return errors.New(out)
		}
		return nil
	})
	restart := func(w wireguard, flags ...string) {
		t.Helper()
		node := w.host.Name()
		if e.key(node) == "<no value>" {
			e.leavesNothing(w)
			w.device()
		}
		w.running.Stop()
		w.agent(flags...)
		testbed.Until(t, "a node that has followed", func() error {
			if has := e.key(node) != "<no value>"; has != (len(flags) > 0) {
				return fmt.Errorf("node %s has a key: %v", node, has)
			}
			return nil
		})
		e.podsRouted(node, "")
	}
	for _, flags := range [][]string{{"--encrypt=preferred"}, {}, {"--encrypt=preferred"}, {"--encrypt"}} {
		restart(e.near, flags...)
		if len(flags) == 0 { // the other one says to whom it does not encrypt
			e.podsRouted("far", "without encryption where the node has no key of WireGuard: node")
		}
		restart(e.behind, flags...)
		testbed.Until(t, fmt.Sprint("the wire with ", flags), func() error {
			wire := e.wire()
			if err := e.ask(at(e.there[0]), 0, 5); err != nil {
				return err
			}
			if err := wire.Check(true, 1); (err == nil) != (len(flags) > 0) {
				return fmt.Errorf("what is encrypted: %w", err)
			}
			return nil
		})
	}
	out := asked()
	if t.Log(out[strings.LastIndex(out, "asked"):]); strings.Contains(out, "failed") {
		t.Errorf("requests while encryption is switched off and on again:\n%s", out)
	}
}

// podsRouted waits until a Node has what PodsRouted says, "" for that all is well.
func (c *cluster) podsRouted(node, text string) {
	c.t.Helper()
	testbed.Until(c.t, "the condition PodsRouted", func() error {
		out, err := c.try("get", "node", node, "-o",
			`jsonpath={.status.conditions[?(@.type=="`+string(runner.PodsRouted)+`")]}`)
		if err != nil || !strings.Contains(out, text) || text == "" && !strings.Contains(out, `"status":"True"`) {
			return fmt.Errorf("%w, it is %s", err, out)
		}
		return nil
	})
}

// wireguard is a host with WireGuard: the kernel's, or a userspace implementation's, which
// has a directory of its own sockets.
type wireguard struct {
	c     *cluster
	host  *testbed.Host
	dir   string // of the agent
	flags []string
	*implementation
}

// implementation is what runs on a host.
type implementation struct {
	running   *process.Process // the agent
	userspace *process.Process // the userspace implementation, nil for the kernel's
	enter     []string         // its mount namespace
}

func (c *cluster) wireguard(host *testbed.Host, dir string, flags []string) wireguard {
	c.t.Helper()
	w := wireguard{c: c, host: host, dir: dir, flags: flags, implementation: &implementation{}}
	w.device()
	return w
}

// device makes the device of WireGuard, by a userspace implementation where the kernel has
// none.
func (w wireguard) device() {
	c := w.c
	c.t.Helper()
	var err error
	w.host.Do(func() {
		err = netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: link.WireGuardDevice}})
	})
	if err == nil {
		return
	}
	if !errors.Is(err, unix.EOPNOTSUPP) {
		c.t.Fatal(err)
	}
	if w.enter == nil {
		rejected := process.Start(c.t, c.fairlead(w.host, c.agentArgs(w.host, w.dir, append(w.flags, "--encrypt")...)...))
		rejected.Says("--encrypt: this kernel has no WireGuard.*wireguard-go " + link.WireGuardDevice)
		if rejected.Wait() == nil {
			c.t.Error("an agent that cannot encrypt ended without an error")
		}
	}
	w.startUserspace("unshare", "--mount", "sh", "-ec", `mount -t tmpfs none /run; exec "$@"`, "sh")
	w.enter = []string{"--mount=/proc/" + fmt.Sprint(w.userspace.Pid()) + "/ns/mnt", "--"}
}

// startUserspace starts a userspace implementation by a command, such as one that enters a mount namespace.
func (w wireguard) startUserspace(by ...string) {
	w.c.t.Helper()
	args := append(by[1:len(by):len(by)], "env", "LOG_LEVEL=verbose", process.Program("wireguard-go"), "-f", link.WireGuardDevice)
	w.userspace = process.Start(w.c.t, w.c.on(w.host, by[0], args...))
	w.userspace.Says("UAPI listener started")
}

// agent starts an agent there.
func (w wireguard) agent(flags ...string) {
	w.c.t.Helper()
	args := w.c.agentArgs(w.host, w.dir, append(w.flags[:len(w.flags):len(w.flags)], flags...)...)
	if w.enter == nil || len(flags) == 0 {
		w.running = process.Start(w.c.t, w.c.fairlead(w.host, args...))
		return
	}
	w.running = process.Start(w.c.t, w.c.on(w.host, "nsenter", append(append(w.enter[:len(w.enter):len(w.enter)],
		process.Program("fairlead")), args...)...))
}
