package preflight

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// minMTU is the least that IPv6 works with (RFC 8200, section 5).
const minMTU = 1280

// firewall is another program that drops packets of Services and Pods unless it is configured not to.
type firewall struct {
	name string
	// table (of nf_tables) and chain (of iptables) are names that only it makes.
	table, chain string
	remedy       string
}

// dockerRemedy stands in docs/proxy.md, too. It names the range of Pods in both directions: answers and packets between Pods
// of two nodes have no entry with DNAT.
const dockerRemedy = "it drops what it does not forward itself: iptables -I DOCKER-USER -d RANGE -j ACCEPT, and -s RANGE, " +
	"for the range of Pods"

var otherFirewalls = []firewall{
	{name: "firewalld", table: "firewalld", chain: "FORWARD_direct",
		remedy: "add the ranges of Pods and Services to a trusted zone (firewall-cmd --permanent --zone=trusted --add-source=RANGE), or stop it"},
	{name: "ufw", chain: "ufw-before-forward",
		remedy: "let it forward (ufw default allow routed, ufw allow from RANGE), or disable it"},
	{name: "docker", chain: "DOCKER-USER", remedy: dockerRemedy},
}

func firewalls(ctx context.Context) (out []Finding) {
	var errs []error
	seen := map[string]bool{}
	errs = append(errs, iptables.Each(func(t *iptables.Tool) error {
		_, err := t.Part(ctx, func(chain string) bool { seen[chain] = true; return false })
		return err
	}))
	for _, f := range otherFirewalls {
		found := seen[f.chain]
		if f.table != "" && !found {
			there, err := inetTable(f.table)
			errs, found = append(errs, err), there
		}
		if found {
			out = append(out, Finding{"firewalls", Warning, "rules of " + f.name + " may drop packets of Services and Pods", f.remedy})
		}
	}
	left, err := kubeproxy.Find(ctx)
	if len(left) > 0 {
		out = append(out, Finding{"kube-proxy", Warning, "rules of kube-proxy are there: " + strings.Join(left, ", "),
			"stop kube-proxy, then run 'fairlead cleanup --kube-proxy'"})
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		out = append(out, Finding{"firewalls", Warning, "cannot look for the rules of other programs: " + oneLine(err),
			"look at 'nft list ruleset'"})
	}
	if len(out) == 0 {
		out = append(out, Finding{"firewalls", OK, "no rules of firewalld, ufw, docker or kube-proxy", ""})
	}
	return out
}

// inetTable reports whether there is a table of that name for both families.
func inetTable(name string) (bool, error) {
	c, err := nftables.Dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	_, found, err := c.Table(nftables.Table{Family: nftables.Inet, Name: name})
	return found, err
}

// ports are bound for a moment each.
func (m Machine) ports() (out []Finding) {
	if m.Agent != "" {
		return []Finding{{"ports", OK, "the agent of node " + m.Agent + " runs here and has its ports", ""}}
	}
	for _, p := range m.Ports {
		err := bind(p)
		what := fmt.Sprintf("%s %s", p.Network, p.Address)
		switch {
		case err == nil:
			continue
		case errors.Is(err, syscall.EADDRINUSE):
			out = append(out, Finding{"ports", Error, what + " is in use", "stop what listens there (ss -lntup), or choose another with " + p.Flag})
		default:
			out = append(out, Finding{"ports", Error, what + ": " + oneLine(err), "choose another with " + p.Flag})
		}
	}
	if len(m.Ports) > 0 && len(out) == 0 {
		out = append(out, Finding{"ports", OK, fmt.Sprintf("%d ports are free", len(m.Ports)), ""})
	}
	return out
}

func bind(p Port) error {
	if p.Network == "udp" {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(p.Address))
		if err != nil {
			return err
		}
		return c.Close()
	}
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p.Address))
	if err != nil {
		return err
	}
	return l.Close()
}

// encryption is what an agent with --encrypt does not start without: WireGuard and its port;
// and whether the packets that are left are large enough.
func (m Machine) encryption() (out []Finding) {
	const check = "encryption"
	e := m.Encryption
	if e == nil {
		return nil
	}
	by, port, err := link.ProbeWireGuard()
	if err != nil {
		out = append(out, Finding{check, Error, oneLine(err), "run 'modprobe wireguard' (Linux 5.6, or the distribution's package of " +
			"the module), or start wireguard-go " + link.WireGuardDevice + " before the agent, or leave out --encrypt on all nodes"})
	} else {
		out = append(out, Finding{check, OK, "WireGuard is " + by + "'s", ""})
	}
	if port != e.Port { // its own device uses the port
		p := Port{Network: "udp", Address: netip.AddrPortFrom(netip.IPv4Unspecified(), e.Port), Flag: "--wireguard-port, the same on all nodes"}
		out = append(out, Machine{Ports: []Port{p}}.ports()...)
	}
	for _, a := range e.Addresses {
		mtu, underlay, err := link.WireGuardMTU(a)
		switch {
		case err != nil:
			out = append(out, Finding{check, Error, oneLine(err), "name an address of this machine with --node-ip"})
		case mtu < minMTU:
			out = append(out, Finding{check, Warning,
				fmt.Sprintf("packets between Pods have %d bytes at most, of the %d at %s; IPv6 needs %d", mtu, underlay, a, minMTU),
				fmt.Sprintf("give the device of %s an MTU of %d, if what is behind it can", a, minMTU+underlay-mtu)})
		default:
			out = append(out, Finding{check, OK, fmt.Sprintf("packets between Pods have %d bytes at most, of the %d at %s", mtu, underlay, a), ""})
		}
	}
	return out
}

// forwarding has to be on, or the agent able to turn it on.
func (m Machine) forwarding() (out []Finding) {
	if m.Root == nil {
		return nil
	}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		text, err := fs.ReadFile(m.Root, "proc/sys/"+key)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without that family
		}
		name := strings.ReplaceAll(key, "/", ".")
		switch value := strings.TrimSpace(string(text)); {
		case err != nil:
			out = append(out, Finding{"forwarding", Error, fmt.Sprintf("cannot read %s: %v", name, err), "mount /proc"})
		case value == "1":
		case m.Agent != "":
			out = append(out, Finding{"forwarding", Error, name + " is " + value + " under a running agent: packets of Pods are dropped",
				"run 'sysctl -w " + name + "=1', and look for what sets it, in /etc/sysctl.d for example"})
		case sysctl.Writable(key):
			out = append(out, Finding{"forwarding", OK, name + " is " + value + "; the agent turns it on", ""})
		default:
			out = append(out, Finding{"forwarding", Error, name + " is " + value + ", and cannot be changed from here",
				"run 'sysctl -w " + name + "=1' on the machine"})
		}
	}
	if len(out) == 0 {
		out = append(out, Finding{"forwarding", OK, "packets are forwarded", ""})
	}
	return out
}

// addresses compares the machine's addresses with the ranges, and looks at its devices.
func (m Machine) addresses() []Finding {
	devices, err := net.Interfaces()
	if err != nil {
		return []Finding{{"addresses", Error, "cannot list the devices: " + err.Error(), "mount /sys, and look at 'ip link'"}}
	}
	var out []Finding
	usable := 0
	for _, d := range devices {
		if d.Flags&net.FlagUp == 0 || d.Flags&net.FlagLoopback != 0 {
			continue
		}
		if d.MTU > 0 && d.MTU < minMTU {
			out = append(out, Finding{"MTU", Warning, fmt.Sprintf("%s carries packets of %d bytes at most; IPv6 needs %d", d.Name, d.MTU, minMTU),
				fmt.Sprintf("run 'ip link set %s mtu %d', if what is behind it can", d.Name, minMTU)})
		}
		addrs, err := d.Addrs()
		if err != nil {
			continue // it has just been removed
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil || !p.Addr().IsGlobalUnicast() {
				continue
			}
			// The agent's own device has an address of the range of its Pods.
			i := slices.IndexFunc(m.Ranges, func(r netip.Prefix) bool { return r.Contains(p.Addr()) })
			if i >= 0 && !link.Ours(d.Name) {
				out = append(out, Finding{"addresses", Error,
					fmt.Sprintf("%s of %s lies in the range %s of Services or Pods", p.Addr(), d.Name, m.Ranges[i]),
					"choose other ranges with --service-cluster-ip-range and --cluster-cidr at the server's first start"})
				continue
			}
			usable++
		}
	}
	if usable == 0 {
		return append(out, Finding{"addresses", Error, "no device has an address by which other nodes reach this one",
			"give the machine an address, then name it with --node-ip"})
	}
	if len(out) == 0 {
		out = append(out, Finding{"addresses", OK, fmt.Sprintf("%d addresses, outside of the ranges of Services and Pods", usable), ""})
	}
	return out
}
