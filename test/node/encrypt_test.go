package node

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/packet"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// plainText is in what Pods send in TestEncrypt.
const plainText = "not to be read between the nodes"

// With --encrypt what Pods send to Pods of another node cannot be read between them: of the
// wire all frames are read. A node with another key than the API has of it, or without one,
// gets nothing, and a new key is followed.
func TestEncrypt(t *testing.T) {
	t.Parallel()
	c := newServer(t, nil, []string{"--encrypt"})
	far := c.network.Far("far")
	far.Sysctl("net/ipv4/ip_forward", "1")
	near, behind := c.wireguard(c.node, "agent"), c.wireguard(far, "far")
	c.cleansUp(c.node, "agent")
	c.cleansUp(far, "far")
	c.agent = near.agent()
	agent := behind.agent()
	c.nodesReady(2)
	for name, node := range map[string]string{"near": "node", "there": "far"} {
		process.Output(t, c.fairlead(c.server, "run", "-d", "--name", name, "-l", "app="+name, "-p", "http=9376", "--node", node,
			"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	}
	c.kubectl("create", "service", "clusterip", "there", "--tcp=80:9376")
	vip := c.kubectl("get", "svc", "there", "-o", "jsonpath={.spec.clusterIP}")
	var from, there string
	testbed.Until(t, "the Pods", func() error {
		out, err := c.try("get", "pods", "-l", "app in (near, there)", "--sort-by=.metadata.labels.app",
			"-o", "jsonpath={.items[0].metadata.name} {.items[1].status.podIP}")
		if fields := strings.Fields(out); err == nil && len(fields) == 2 {
			from, there = fields[0], fields[1]
			return nil
		}
		return errors.Join(err, errors.New(out))
	})
	wire := listenTo(t, c.node)
	ask := func(at string, body, seconds int) error {
		_, err := c.try("exec", from, "--", "sh", "-c",
			fmt.Sprintf("(echo %s; head -c %d /dev/zero) | curl -sS --max-time %d --data-binary @- http://%s", plainText, body, seconds, at))
		return err
	}
	for _, at := range []string{there + ":9376", vip} {
		testbed.Until(t, "an answer from "+at, func() error { return ask(at, 0, 5) })
		testbed.Until(t, "an answer to the node from "+at, func() error {
			_, err := process.Try(c.node.Command(t.Context(), "curl", "-sS", "--max-time", "5", "http://"+at))
			return err
		})
	}
	if err := ask(there+":9376", 200_000, 20); err != nil {
		t.Errorf("a body that is larger than any packet: %v", err)
	}

	// The other node's key is replaced by that of an unknown machine, and then removed.
	agent.Stop()
	other, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	key := func() string {
		return c.kubectl("get", "node", "far", "-o", `go-template={{index .metadata.annotations "`+svc.PublicKeyAnnotation+`"}}`)
	}
	old := key()
	c.kubectl("annotate", "--overwrite", "node", "far", svc.PublicKeyAnnotation+"="+other.PublicKey().String())
	closed := func(what string) {
		testbed.Until(t, "the end of answers with "+what, func() error {
			if ask(there+":9376", 0, 2) == nil {
				return errors.New("it answers")
			}
			return nil
		})
	}
	closed("another key")
	c.kubectl("annotate", "node", "far", svc.PublicKeyAnnotation+"-")
	c.podsRouted("no public key of WireGuard")
	closed("no key")
	if err := os.Remove(c.path("far/agent/wireguard.key")); err != nil {
		t.Fatal(err)
	}
	behind.agent()
	testbed.Until(t, "an answer with a new key", func() error { return ask(there+":9376", 0, 5) })
	if now := key(); now == old {
		t.Error("the key is the old one")
	}
	c.podsRouted("")
	wire.check(t)
}

// podsRouted waits until the Node has what PodsRouted says, "" for that all is well.
func (c *cluster) podsRouted(text string) {
	c.t.Helper()
	testbed.Until(c.t, "the condition PodsRouted", func() error {
		out, err := c.try("get", "node", "node", "-o",
			`jsonpath={.status.conditions[?(@.type=="`+string(runner.PodsRouted)+`")]}`)
		if err != nil || !strings.Contains(out, text) || text == "" && !strings.Contains(out, `"status":"True"`) {
			return fmt.Errorf("%w, it is %s", err, out)
		}
		return nil
	})
}

// wireguard is a host with WireGuard: the kernel's, or a userspace implementation's, which
// has a directory of sockets of its own.
type wireguard struct {
	c     *cluster
	host  *testbed.Host
	dir   string // of the agent
	enter []string
}

func (c *cluster) wireguard(host *testbed.Host, dir string) wireguard {
	c.t.Helper()
	w := wireguard{c: c, host: host, dir: dir}
	var err error
	host.Do(func() {
		err = netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: link.WireGuardDevice}})
	})
	if err == nil {
		return w
	}
	if !errors.Is(err, unix.EOPNOTSUPP) {
		c.t.Fatal(err)
	}
	rejected := process.Start(c.t, c.fairlead(host, c.agentArgs(host, dir)...))
	rejected.Says("--encrypt: this kernel has no WireGuard.*wireguard-go " + link.WireGuardDevice)
	if rejected.Wait() == nil {
		c.t.Error("an agent that cannot encrypt ended without an error")
	}
	const sockets = "/run/wireguard"
	c.t.Cleanup(func() { _ = os.Remove(sockets) })
	implementation := process.Start(c.t, c.on(host, "unshare", "--mount", "sh", "-ec",
		"mkdir -p "+sockets+"; mount -t tmpfs none "+sockets+"; LOG_LEVEL=verbose exec "+process.Program("wireguard-go")+" -f "+
			link.WireGuardDevice))
	implementation.Says("UAPI listener started")
	w.enter = []string{"--mount=/proc/" + fmt.Sprint(implementation.Pid()) + "/ns/mnt", "--", process.Program("fairlead")}
	return w
}

// agent starts an agent there.
func (w wireguard) agent() *process.Process {
	w.c.t.Helper()
	args := w.c.agentArgs(w.host, w.dir)
	if w.enter == nil {
		return process.Start(w.c.t, w.c.fairlead(w.host, args...))
	}
	return process.Start(w.c.t, w.c.on(w.host, "nsenter", append(w.enter, args...)...))
}

// wire is what has passed the interface of a host.
type wire struct {
	mu        sync.Mutex
	encrypted int
	plain     []string
}

// listenTo reads all frames of a host until the test ends.
func listenTo(t *testing.T, host *testbed.Host) *wire {
	t.Helper()
	var conn *packet.Conn
	var err error
	host.Do(func() {
		var dev netlink.Link
		if dev, err = netlink.LinkByName("eth0"); err == nil {
			conn, err = packet.Listen(dev.Attrs().Index, unix.ETH_P_ALL)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, err := conn.Receive(buf)
			if err != nil {
				return
			}
			w.add(buf[:n])
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		reading.Wait()
	})
	return w
}

// add takes in an Ethernet frame.
func (w *wire) add(frame []byte) {
	const ethernet, header = 14, 20
	if len(frame) < ethernet+header+4 {
		return
	}
	ip := frame[ethernet:]
	is4 := frame[12] == 0x08 && frame[13] == 0x00
	source, destination := netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
	pods := netip.MustParsePrefix("10.244.0.0/16")
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case bytes.Contains(frame, []byte(plainText)), is4 && (pods.Contains(source) || pods.Contains(destination)):
		w.plain = append(w.plain, fmt.Sprintf("%s to %s, protocol %d", source, destination, ip[9]))
	case is4 && ip[9] == unix.IPPROTO_UDP && ip[header+2] == 51820>>8 && ip[header+3] == 51820&0xff:
		w.encrypted++
	}
}

func (w *wire) check(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.plain) > 0 {
		t.Errorf("%d frames in plain text, the first is %s", len(w.plain), w.plain[0])
	}
	if w.encrypted < 20 {
		t.Errorf("%d frames of WireGuard were seen", w.encrypted)
	}
}
