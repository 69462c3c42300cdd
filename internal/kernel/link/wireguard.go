package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// WireGuardDevice is the name of the device of WireGuard.
const WireGuardDevice = "fl0wg"

// What WireGuard puts before a packet: its header, that of UDP, and that of IP, in bytes.
const (
	wireguardOverhead4 = 60
	wireguardOverhead6 = 80
)

// Key is a public key of WireGuard. The zero Key is none.
type Key = wgtypes.Key

// ParseKey reads a public key as Key.String writes it.
func ParseKey(s string) (Key, error) { return wgtypes.ParseKey(s) }

// WireGuard encrypts what goes to pods of other nodes. It has one device, which carries both
// families of pods; a packet from a peer is accepted only with an address of that peer's
// pods. It belongs to one network namespace, and is used by one goroutine at a time.
type WireGuard struct {
	keyFile string
	port    uint16
	key     wgtypes.Key
	client  *wgctrl.Client
	rules   *nftables.Conn

	// What has been written, nil or 0 after Forget.
	index, mtu int
	peers      map[Key]Peer
	pods       []netip.Prefix
}

// OpenWireGuard makes the device, with the private key in keyFile (a new one if there is
// none) and the UDP port of all nodes. A device of that name that a userspace
// implementation has made (wireguard-go) is used; without one the kernel has to have
// WireGuard.
func OpenWireGuard(keyFile string, port uint16) (w *WireGuard, err error) {
	w = &WireGuard{keyFile: keyFile, port: port}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if w.key, err = privateKey(keyFile); err != nil {
		return nil, err
	}
	if w.client, err = wgctrl.New(); err != nil {
		return nil, fmt.Errorf("open WireGuard: %w", err)
	}
	if w.rules, err = nftables.Dial(); err != nil {
		return nil, err
	}
	_, err = w.ensure()
	return w, err
}

// Close ends the use of the kernel; written state stays.
func (w *WireGuard) Close() (err error) {
	if w.client != nil {
		err = w.client.Close()
	}
	if w.rules != nil {
		err = errors.Join(err, w.rules.Close())
	}
	return err
}

// PublicKey is what the other nodes have to know.
func (w *WireGuard) PublicKey() Key { return w.key.PublicKey() }

// MTU returns how large packets may be that are encrypted, 0 before the first Set.
func (w *WireGuard) MTU() int { return w.mtu }

// Forget has the next Set compare everything with the kernel.
func (w *WireGuard) Forget() { w.index, w.peers, w.pods = 0, nil, nil }

// privateKey reads the key in a file, or makes both.
func privateKey(file string) (wgtypes.Key, error) {
	text, err := os.ReadFile(file)
	if err == nil {
		key, err := wgtypes.ParseKey(string(text))
		if err != nil {
			return key, fmt.Errorf("read the private key of WireGuard in %s: %w; remove the file, and the next start makes another key", file, err)
		}
		return key, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return wgtypes.Key{}, fmt.Errorf("read the private key of WireGuard: %w", err)
	}
	key, err := wgtypes.GeneratePrivateKey()
	if err == nil {
		err = fileio.Replace(file, []byte(key.String()), 0o600)
	}
	if err != nil {
		return key, fmt.Errorf("make a private key of WireGuard: %w", err)
	}
	return key, nil
}

// ensure makes the device, or takes one that is there, and sets its key and port.
func (w *WireGuard) ensure() (netlink.Link, error) {
	dev, err := netlink.LinkByName(WireGuardDevice)
	if err == nil && dev.Attrs().Index == w.index {
		return dev, nil
	}
	if isMissing(err) {
		if dev, err = addWireGuard(); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, fmt.Errorf("find device %s: %w", WireGuardDevice, err)
	}
	have, err := w.client.Device(WireGuardDevice)
	if err != nil {
		return nil, notWireGuard(err)
	}
	if port := int(w.port); have.PrivateKey != w.key || have.ListenPort != port {
		if err := w.client.ConfigureDevice(WireGuardDevice, wgtypes.Config{PrivateKey: &w.key, ListenPort: &port}); err != nil {
			return nil, fmt.Errorf("set the key and UDP port %d of %s: %w", port, WireGuardDevice, err)
		}
	}
	if err := take(dev); err != nil {
		return nil, err
	}
	w.peers = map[Key]Peer{}
	for _, p := range have.Peers {
		w.peers[p.PublicKey] = decodePeer(&p)
	}
	return dev, nil
}

// addWireGuard makes a device of the kernel's WireGuard.
func addWireGuard() (netlink.Link, error) {
	l := &netlink.Wireguard{LinkAttrs: netlink.NewLinkAttrs()}
	l.Name = WireGuardDevice
	return addDevice(l, fmt.Errorf("this kernel has no WireGuard: load its module (modprobe wireguard), "+
		"or make the device %s by a userspace implementation first (wireguard-go %s)", WireGuardDevice, WireGuardDevice))
}

// ProbeWireGuard returns what encrypts here: "the kernel", or "a userspace implementation"
// that has made the device, and the UDP port of a device that is there, 0 without. The error
// is that of OpenWireGuard where nothing does. It leaves nothing behind.
func ProbeWireGuard() (by string, port uint16, err error) {
	const kernel, userspace = "the kernel", "a userspace implementation"
	_, err = netlink.LinkByName(WireGuardDevice)
	if isMissing(err) {
		err := netns.OnThread(func() error {
			// The kernel ends a namespace, and the device in it, with its last thread.
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("make a network namespace to try WireGuard in: %w", err)
			}
			_, err := addWireGuard()
			return err
		})
		if err != nil {
			return "", 0, err
		}
		return kernel, 0, nil
	}
	if err != nil {
		return "", 0, fmt.Errorf("find device %s: %w", WireGuardDevice, err)
	}
	client, err := wgctrl.New()
	if err != nil {
		return "", 0, fmt.Errorf("open WireGuard: %w", err)
	}
	defer client.Close()
	have, err := client.Device(WireGuardDevice)
	if err != nil {
		return "", 0, notWireGuard(err)
	}
	if by = userspace; have.Type == wgtypes.LinuxKernel {
		by = kernel
	}
	return by, uint16(have.ListenPort), nil
}

func notWireGuard(err error) error {
	return fmt.Errorf("device %s is not WireGuard's, or what made it has ended: %w; remove it", WireGuardDevice, err)
}

// WireGuardMTU returns how large packets may be that are encrypted between this node's
// address local, on whose device underlay is the limit, and nodes of its family.
func WireGuardMTU(local netip.Addr) (mtu, underlay int, err error) {
	if underlay, err = underlayMTU(local); err != nil {
		return 0, 0, err
	}
	if local.Is4() {
		return underlay - wireguardOverhead4, underlay, nil
	}
	return underlay - wireguardOverhead6, underlay, nil
}

// Set makes peers the only ones. local are the addresses of this node, gateways the addresses that
// it has among its pods, pods the ranges of all pods. It returns the routes to the peers'
// pods, for Routes.Set. All that differs from the last call is one message to the kernel.
func (w *WireGuard) Set(peers []Peer, local, gateways []netip.Addr, pods []netip.Prefix) (routes []Route, err error) {
	dev, err := w.ensure()
	if err != nil {
		return nil, err
	}
	mtu, err := w.mtuFor(peers, local)
	if err != nil {
		return nil, err
	}
	if dev.Attrs().Index != w.index || mtu != w.mtu {
		if err := bringUp(dev, mtu, gateways); err != nil {
			return nil, err
		}
		w.index, w.mtu = dev.Attrs().Index, mtu
	}
	if err := w.masquerade(pods); err != nil {
		return nil, err
	}
	want := map[Key]Peer{}
	for _, p := range peers {
		slices.SortFunc(p.Pods, netip.Prefix.Compare)
		want[p.Key] = p
		for _, c := range p.Pods {
			routes = append(routes, Route{Dst: c, Device: w.index})
		}
	}
	changes := w.differences(want)
	if len(changes) == 0 {
		return routes, nil
	}
	added := w.greet(changes)
	err = w.client.ConfigureDevice(WireGuardDevice, wgtypes.Config{Peers: changes})
	if err == nil && len(added) > 0 {
		err = w.client.ConfigureDevice(WireGuardDevice, wgtypes.Config{Peers: added})
	}
	if err != nil {
		w.Forget()
		return nil, fmt.Errorf("write %d peers of %s: %w", len(changes), WireGuardDevice, err)
	}
	w.peers = want
	return routes, nil
}

// maxGreeted bounds how many handshakes one Set begins.
const maxGreeted = 100

// greet has a handshake begin with each new peer of changes as soon as it is written. The peer may have begun one before this node knew
// its key, and waits for 5 s until its next try. WireGuard begins one when keep-alives are switched on, which the returned changes
// switch off again.
func (w *WireGuard) greet(changes []wgtypes.PeerConfig) (after []wgtypes.PeerConfig) {
	for i := range changes {
		c := &changes[i]
		if _, known := w.peers[c.PublicKey]; c.Remove || known || len(after) == maxGreeted {
			continue
		}
		c.PersistentKeepaliveInterval = new(time.Minute)
		after = append(after, wgtypes.PeerConfig{PublicKey: c.PublicKey, UpdateOnly: true, PersistentKeepaliveInterval: new(time.Duration(0))})
	}
	return after
}

// differences returns what makes w.peers want. Keys that end come first: another peer may
// get their ranges.
func (w *WireGuard) differences(want map[Key]Peer) (out []wgtypes.PeerConfig) {
	for key := range w.peers {
		if _, wanted := want[key]; !wanted {
			out = append(out, wgtypes.PeerConfig{PublicKey: key, Remove: true})
		}
	}
	for key, p := range want {
		have, ok := w.peers[key]
		if ok && have.Addr == p.Addr && slices.Equal(have.Pods, p.Pods) {
			continue
		}
		c := wgtypes.PeerConfig{
			PublicKey: key, ReplaceAllowedIPs: true,
			Endpoint: net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Addr, w.port)),
		}
		for _, r := range p.Pods {
			c.AllowedIPs = append(c.AllowedIPs, *network(r))
		}
		out = append(out, c)
	}
	return out
}

// decodePeer returns a peer as Set has it.
func decodePeer(p *wgtypes.Peer) Peer {
	out := Peer{Key: p.PublicKey}
	if p.Endpoint != nil {
		out.Addr = p.Endpoint.AddrPort().Addr().Unmap()
	}
	for _, n := range p.AllowedIPs {
		ones, _ := n.Mask.Size()
		out.Pods = append(out.Pods, netip.PrefixFrom(toAddr(n.IP), ones))
	}
	slices.SortFunc(out.Pods, netip.Prefix.Compare)
	return out
}

// mtuFor is the size of packets that suits the families of all peers, and before there are
// any that of this node's first address.
func (w *WireGuard) mtuFor(peers []Peer, local []netip.Addr) (int, error) {
	mtu := 0
	for _, a := range local {
		used := slices.ContainsFunc(peers, func(p Peer) bool { return p.Addr.Is4() == a.Is4() })
		if mtu != 0 && !used {
			continue
		}
		m, _, err := WireGuardMTU(a)
		if err != nil {
			return 0, err
		}
		if mtu == 0 || m < mtu {
			mtu = m
		}
	}
	if mtu == 0 {
		return 0, errors.New("this node has no InternalIP")
	}
	return mtu, nil
}

// wireguardTable is the nft table of WireGuard.
var wireguardTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-wireguard"}

// masquerade gives packets that leave by the device, from addresses that are no pod's, one
// of this node's among its pods: the peer would drop them.
func (w *WireGuard) masquerade(pods []netip.Prefix) error {
	if w.pods != nil && slices.Equal(w.pods, pods) {
		return nil
	}
	const chain = "postrouting"
	b := nftables.NewBatch()
	b.ReplaceTable(wireguardTable, "the senders of what WireGuard encrypts")
	b.AddChain(wireguardTable, nftables.Chain{
		Name: chain, Hook: &nftables.Hook{Type: "nat", Number: nftables.Postrouting, Priority: nftables.PrioritySrcNAT - 1},
	})
	for _, p := range pods {
		h := nftables.HeaderOf(svc.FamilyOf(p.Addr()))
		b.AddRule(wireguardTable, chain, nftables.NewRule(h.InetPrefix(h.Source, p).Return(), "%s saddr %s return", h.Word, p))
	}
	b.AddRule(wireguardTable, chain, masqueradeBy(WireGuardDevice))
	if err := w.rules.Commit(b); err != nil {
		return fmt.Errorf("write nft table %s: %w", wireguardTable, err)
	}
	w.pods = slices.Clone(pods)
	return nil
}

// RemoveWireGuard removes the device and its rules. It is no error if there are none.
func RemoveWireGuard() error {
	return errors.Join(nftables.RemoveTable(wireguardTable), RemoveDevice(WireGuardDevice, alias))
}
