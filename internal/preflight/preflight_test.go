package preflight

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// sh runs a script in the network namespace of the calling thread.
func sh(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// has fails unless a finding of that check and level mentions text, and what is not OK
// comes with what to do.
func has(t *testing.T, findings []Finding, check string, level Level, text string) {
	t.Helper()
	found := false
	for _, f := range findings {
		found = found || f.Check == check && f.Level == level && strings.Contains(f.Message, text)
		if (f.Level == OK) != (f.Remedy == "") {
			t.Errorf("a finding without a remedy, or with a needless one: %+v", f)
		}
	}
	if !found {
		t.Errorf("no %s of level %s with %q in %+v", check, level, text, findings)
	}
}

func TestFirewalls(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		has(t, firewalls(t.Context()), "firewalls", OK, "no rules")
		sh(t, `nft add table inet firewalld
			iptables-nft -N DOCKER-USER
			iptables-legacy -N ufw-before-forward
			iptables-nft -t nat -N KUBE-SERVICES`)
		found := firewalls(t.Context())
		for _, name := range []string{"firewalld", "ufw", "docker"} {
			has(t, found, "firewalls", Warning, "rules of "+name+" ")
		}
		has(t, found, "kube-proxy", Warning, "1 chains of iptables")
		if Failed(found) {
			t.Errorf("an error: %+v", found)
		}
	})
}

func TestPorts(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		l, err := net.Listen("tcp", "127.0.0.1:10250")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		at := netip.MustParseAddrPort("127.0.0.1:10250")
		m := Machine{Ports: []Port{
			{"udp", at, "--dns-port"}, {"tcp", at, "--agent-port"}, {"tcp", netip.MustParseAddrPort("192.0.2.77:1"), "--node-ip"},
		}}
		found := m.ports()
		has(t, found, "ports", Error, "tcp 127.0.0.1:10250 is in use")
		has(t, found, "ports", Error, "tcp 192.0.2.77:1: ")
		if len(found) != 2 || !Failed(found) {
			t.Errorf("found %+v", found)
		}
		m.Ports = m.Ports[:1]
		has(t, m.ports(), "ports", OK, "1 ports are free")
	})
}

func TestAddresses(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		m := Machine{Ranges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:96::/112")}}
		sh(t, "for d in $(ip -o link | cut -d: -f2 | cut -d@ -f1); do ip addr flush dev $d; done")
		has(t, m.addresses(), "addresses", Error, "no device has an address")
		sh(t, "ip link add up0 type veth peer name up1; ip link set up0 up; ip addr add 192.0.2.7/24 dev up0")
		has(t, m.addresses(), "addresses", OK, "1 addresses")
		sh(t, "ip link set up0 mtu 1200; ip addr add 10.100.0.1/24 dev up0")
		found := m.addresses()
		has(t, found, "addresses", Error, "10.100.0.1 of up0 lies in the range 10.96.0.0/12")
		has(t, found, "MTU", Warning, "1200 bytes")
		sh(t, "ip addr del 10.100.0.1/24 dev up0; ip link add fl0 type veth peer name x1; ip link set fl0 up; ip addr add 10.100.0.1/32 dev fl0")
		if found := m.addresses(); Failed(found) {
			t.Errorf("the node's own device: %+v", found)
		}
	})
}

// Forwarding that the agent cannot turn on is an error.
func TestForwarding(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		m := Machine{Root: os.DirFS("/proc/thread-self/root")}
		set := func(value string) {
			for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
				if err := sysctl.Set(key, value); err != nil {
					t.Fatal(err)
				}
			}
		}
		set("0")
		has(t, m.forwarding(), "forwarding", OK, "net.ipv4.ip_forward is 0; the agent turns it on")
		if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := unix.Unmount("/proc/sys", 0); err != nil {
				t.Error(err)
			}
		}()
		if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Fatal(err)
		}
		has(t, m.forwarding(), "forwarding", Error, "net.ipv4.ip_forward is 0, and cannot be changed")
		if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT, ""); err != nil {
			t.Fatal(err)
		}
		set("1")
		has(t, m.forwarding(), "forwarding", OK, "packets are forwarded")
	})
}

// One mode that works is enough.
func TestModes(t *testing.T) {
	works := Mode{"works", func(context.Context) error { return nil }}
	fails := Mode{"fails", func(context.Context) error { return errors.Join(errors.New("no module"), errors.New("no program")) }}
	found := Machine{Modes: []Mode{fails, works}}.modes(t.Context())
	has(t, found, "mode fails", Warning, "no module; no program")
	has(t, found, "mode works", OK, "works")
	if Failed(found) {
		t.Errorf("one mode works: %+v", found)
	}
	found = Machine{Modes: []Mode{fails}}.modes(t.Context())
	has(t, found, "modes", Error, "no mode")
}

// What the kernel cannot have, and the rest does without, is a warning.
func TestFeatures(t *testing.T) {
	found := Machine{Features: []Feature{
		{Name: "one", Probe: func() error { return nil }, Without: "nobody minds", Remedy: "load it"},
		{Name: "other", Probe: func() error { return errors.New("no expression") }, Without: "Pods stay inside", Remedy: "load it"},
	}}.features()
	has(t, found, "one", OK, "works")
	has(t, found, "other", Warning, "Pods stay inside: no expression")
	if Failed(found) {
		t.Errorf("a part that the rest does without: %+v", found)
	}
}

func TestDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	m := Machine{StateDir: filepath.Join(dir, "not/yet/there")}
	has(t, m.disk(), "disk", OK, "there is room in "+dir)
	if err := os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1000<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	has(t, m.disk(), "disk", Warning, "0 MiB free")
	m.StateDir = filepath.Join(dir, "full", "below")
	has(t, m.disk(), "disk", Error, "cannot look")
}

// All checks together find something to say about each subject, and change nothing.
func TestCheck(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		found := Machine{Root: os.DirFS("/proc/thread-self/root"), StateDir: t.TempDir()}.Check(t.Context())
		for _, check := range []string{"forwarding", "firewalls", "clock", "addresses", "cgroups", "disk"} {
			if !strings.Contains(strings.Join(checksOf(found), " "), check) {
				t.Errorf("nothing about %s in %+v", check, found)
			}
		}
	})
}

func checksOf(findings []Finding) (out []string) {
	for _, f := range findings {
		out = append(out, f.Check)
	}
	return out
}

// --encrypt needs WireGuard, its port, and room in packets.
func TestEncryption(t *testing.T) {
	host := testbed.NewNetwork(t).Outside("host")
	host.Do(func() {
		at := []netip.Addr{host.Addr4(), host.Addr6()}
		const port = 51820
		m := Machine{Encryption: &Encryption{Port: port, Addresses: at}}
		found := m.encryption()
		if err := kernelHasWireGuard(); err != nil {
			has(t, found, "encryption", Error, "this kernel has no WireGuard")
		} else {
			has(t, found, "encryption", OK, "WireGuard is the kernel's")
		}
		has(t, found, "ports", OK, "1 ports are free")
		has(t, found, "encryption", OK, "1440 bytes at most, of the 1500 at "+at[0].String())
		has(t, found, "encryption", OK, "1420 bytes at most, of the 1500 at "+at[1].String())
		if out, err := exec.Command("ip", "-o", "link", "show", "type", "wireguard").Output(); err != nil || len(out) > 0 {
			t.Errorf("a device is left: %s, %v", out, err)
		}

		l, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		sh(t, "ip link set eth0 mtu 1350")
		found = m.encryption()
		has(t, found, "ports", Error, "udp 0.0.0.0:51820 is in use")
		has(t, found, "encryption", OK, "1290 bytes at most, of the 1350 at "+at[0].String())
		has(t, found, "encryption", Warning, "1270 bytes at most, of the 1350 at "+at[1].String())

		sh(t, "ip link add fl0wg type bridge")
		has(t, m.encryption(), "encryption", Error, "device fl0wg is not WireGuard's")
		m.Encryption.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.99")}
		has(t, m.encryption(), "encryption", Error, "no device has this node's address 192.0.2.99")
		if m.Encryption = nil; len(m.encryption()) > 0 {
			t.Error("findings without --encrypt")
		}
	})
}

// kernelHasWireGuard makes a device of another name, and removes it.
func kernelHasWireGuard() error {
	if err := exec.Command("ip", "link", "add", "probe0", "type", "wireguard").Run(); err != nil {
		return err
	}
	return exec.Command("ip", "link", "delete", "probe0").Run()
}

// A chain that drops what it does not accept is named; one without rules keeps a node from working.
func TestPoliciesThatDrop(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		if found := policies(); len(found) != 0 {
			t.Errorf("without rules: %+v", found)
		}
		sh(t, "iptables-nft -P FORWARD DROP")
		found := policies()
		has(t, found, "forwarding", Error, "chain FORWARD of table ip filter has the policy drop and no rules")
		reason, why, err := DropsForwarded(t.Context(), Packets{})
		if err != nil || reason != "PolicyDrop" || !strings.Contains(why, "chain FORWARD of table ip filter") {
			t.Errorf("%s %q, %v", reason, why, err)
		}
		sh(t, "iptables-nft -A FORWARD -d 10.244.0.0/16 -j ACCEPT")
		has(t, policies(), "forwarding", Warning, "chain FORWARD of table ip filter drops forwarded packets that none")
		if reason, why, err := DropsForwarded(t.Context(), Packets{}); err != nil || reason != "" {
			t.Errorf("with a rule: %q, %v", why, err)
		}
		m := Machine{Root: os.DirFS("/"), Agent: "n1", Ports: []Port{{"tcp", netip.MustParseAddrPort("127.0.0.1:1"), "--x"}}}
		has(t, m.ports(), "ports", OK, "the agent of node n1 runs here")
		sh(t, "sysctl -qw net.ipv4.ip_forward=0")
		has(t, m.forwarding(), "forwarding", Error, "net.ipv4.ip_forward is 0 under a running agent")
	})
}
