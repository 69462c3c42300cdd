package parts

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// maxDialed bounds how many addresses of the server are remembered.
const maxDialed = 16

// Dialed remembers where a client has reached its API server, whichever name leads
// there: an address of a server, or of a load balancer before several.
type Dialed struct {
	mu    sync.Mutex
	addrs []netip.AddrPort // the last one last
}

// Record has the clients made from cfg record their connections.
func (d *Dialed) Record(cfg *rest.Config) {
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext // client-go's default
	}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err == nil {
			d.add(conn.RemoteAddr())
		}
		return conn, err
	}
}

func (d *Dialed) add(a net.Addr) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return
	}
	at := netip.AddrPortFrom(tcp.AddrPort().Addr().Unmap(), tcp.AddrPort().Port())
	d.mu.Lock()
	defer d.mu.Unlock()
	d.addrs = slices.DeleteFunc(d.addrs, func(o netip.AddrPort) bool { return o == at })
	if len(d.addrs) == maxDialed {
		d.addrs = d.addrs[1:]
	}
	d.addrs = append(d.addrs, at)
}

// Servers returns the addresses, sorted.
func (d *Dialed) Servers() []netip.AddrPort {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := slices.Clone(d.addrs)
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}
