package nodelocal

import (
	"errors"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// table is the one nft table of this package.
var table = nftables.Table{Family: nftables.Inet, Name: "fairlead-dns"}

// AliveFor is how long after the local server has last sent a packet from the
// Service's address and port this node's own programs are still led to it: a
// server with nothing to say sends one to itself now and then. Packets from Pods
// are led by whether the server's socket exists.
const AliveFor = 2 * time.Second

// MaxOthers bounds the other servers that packets fall back to.
const MaxOthers = 16

// Config describes the addresses served on this node.
type Config struct {
	// Addrs are the addresses of the Service, Port its port, of UDP and TCP.
	Addrs []netip.Addr
	Port  uint16
	// Source are this node's own addresses. Connections of the node itself to
	// other ports of the Service leave from them.
	Source []netip.Addr
	// Others are servers elsewhere, used while the local one does not run. With
	// none, the proxy's rules decide. Those beyond MaxOthers are left out.
	Others []netip.AddrPort
}

// Install makes the kernel do what c says, in place of what an earlier call, or
// an earlier process, made it do. The nft table changes in one transaction. The
// server must listen already: it counts as one that has just sent a packet.
func Install(c Config) error {
	var errs []error
	for _, a := range c.Addrs {
		errs = append(errs, link.EnsureLocal(a, c.Source))
	}
	return errors.Join(append(errs, eitherWay(func(led leading) error { return write(c, led) }))...)
}

// eitherWay does something bySocket, and byTime where the kernel cannot: those before 4.18, or
// without the module, have no expression for sockets.
func eitherWay(do func(leading) error) error {
	err := do(bySocket)
	if nftables.IsUnsupported(err) {
		err = do(byTime)
	}
	return err
}

// Probe returns why Install cannot work here, or nil. It asks the kernel in a transaction that takes
// back what it makes.
func Probe() error {
	c := Config{
		Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Port: 53,
		Others: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.2:53"), netip.MustParseAddrPort("192.0.2.3:53")},
	}
	return eitherWay(func(led leading) error {
		return transaction(func(b *nftables.Batch) nftables.Table {
			t := nftables.Table{Family: nftables.Inet, Name: table.Name + "-probe"}
			b.Tag(nftables.InetTables)
			b.AddTable(t, "")
			c.add(b, t, led)
			b.Tag(nil)
			b.DelTable(t)
			return t
		})
	})
}

// Yield leaves new packets to the proxy's rules, after Install, while the local server
// still answers the questions that it has: its answers stay untracked, and the addresses this
// node's own, without which they could not be sent.
func Yield(c Config) error { return write(c, none) }

// Intact reports whether what Install made still exists.
func Intact(c Config) (bool, error) {
	conn, err := nftables.Dial()
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }()
	if _, found, err := conn.Table(table); err != nil || !found {
		return false, err
	}
	have, err := link.Local()
	return len(have) == len(c.Addrs), err
}

// Remove takes back what Install did. It is no error if there is nothing. The rules go
// first: with them and without the route, packets would leave this node untranslated.
func Remove() error { return errors.Join(nftables.RemoveTable(table), link.RemoveLocal()) }
