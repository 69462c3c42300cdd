package relay

import (
	"container/list"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// datagramsAtOnce is how many datagrams of a socket are carried before other
// events have their turn.
const datagramsAtOnce = 32

// udpKey is what a client is known by: its address, and the one of this node
// that it sent to, from which the answer must come.
type udpKey struct {
	listener    int32
	client      netip.AddrPort
	destination netip.Addr
}

// udpClient is a client of a UDP listener at its endpoint.
type udpClient struct {
	key      udpKey
	slot     int32
	listener *Listener
	fd       int // connected to the endpoint
	endpoint netip.AddrPort
	answered bool
	last     time.Time
	element  *list.Element // in datagrams.idle
}

// datagrams are the clients of a thread's UDP listeners. Only the thread uses
// them.
type datagrams struct {
	w        *worker
	datagram [64 << 10]byte
	oob      []byte
	clients  slots[*udpClient]
	byClient map[udpKey]*udpClient
	idle     *list.List // of udpClients, the one silent longest first
}

// fromClients carries datagrams of a listener's clients to their endpoints.
func (u *datagrams) fromClients(l *Listener) {
	for range datagramsAtOnce {
		n, oobn, _, from, err := unix.Recvmsg(l.fd, u.datagram[:], u.oob, unix.MSG_DONTWAIT)
		if is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		k := udpKey{listener: l.id, client: addrPort(from), destination: destination(u.oob[:oobn])}
		u.toEndpoint(l, k, u.datagram[:n])
	}
}

// toEndpoint sends one datagram. An endpoint that refused an earlier one reports it
// now, and the next one gets it.
func (u *datagrams) toEndpoint(l *Listener, k udpKey, b []byte) {
	var tried []netip.AddrPort
	for {
		c := u.byClient[k]
		if c != nil && !l.target.Serves(c.endpoint) {
			u.drop(c)
			c = nil
		}
		if c == nil {
			if c = u.newClient(l, k, tried); c == nil {
				return
			}
		}
		c.last = u.w.now
		u.idle.MoveToBack(c.element)
		n, err := retry(func() (int, error) { return unix.Write(c.fd, b) })
		switch {
		case err == nil:
			u.w.toEndpoints.Add(int64(n))
			return
		case is(err, unix.EAGAIN), noFiles(err), is(err, unix.EMSGSIZE):
			return // lost on the way, as datagrams are
		}
		tried = append(tried, c.endpoint)
		u.failed(c)
	}
}

// newClient chooses an endpoint; nil if there is none, or no room.
func (u *datagrams) newClient(l *Listener, k udpKey, tried []netip.AddrPort) *udpClient {
	if !u.w.room(1) {
		oldest := u.silent()
		if oldest == nil {
			return nil
		}
		u.drop(oldest)
		if !u.w.room(1) {
			return nil
		}
	}
	for {
		ep, _ := l.target.Pick(k.client.Addr(), tried)
		if !ep.IsValid() {
			break
		}
		fd, err := unix.Socket(domain(l.Family), unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			break
		}
		c := &udpClient{key: k, listener: l, fd: fd, endpoint: ep, last: u.w.now}
		if err := unix.Connect(fd, sockaddr(ep)); err != nil {
			_ = unix.Close(fd)
			u.w.engine.failed(l.target, ep)
			tried = append(tried, ep)
			continue
		}
		c.slot = u.clients.add(c)
		c.element = u.idle.PushBack(c)
		u.byClient[k] = c
		u.w.engine.count.udpClients.Add(1)
		if u.w.watch(fd, unix.EPOLLIN, kindUDP, c.slot) != nil {
			u.drop(c)
			return nil
		}
		return c
	}
	u.w.leave(1)
	return nil
}

// fromEndpoint carries datagrams back to a client.
func (u *datagrams) fromEndpoint(c *udpClient) {
	for range datagramsAtOnce {
		n, err := retry(func() (int, error) { return unix.Read(c.fd, u.datagram[:]) })
		if is(err, unix.EAGAIN) {
			return
		}
		if err != nil {
			u.failed(c)
			return
		}
		if !c.answered {
			c.answered = true
			c.listener.target.Answered(c.endpoint)
		}
		c.last = u.w.now
		u.idle.MoveToBack(c.element)
		n, err = unix.SendmsgN(c.listener.fd, u.datagram[:n], source(c.key.destination), sockaddr(c.key.client), unix.MSG_DONTWAIT)
		if err == nil {
			u.w.toClients.Add(int64(n))
		}
	}
}

// failed ends a client whose endpoint refused a datagram.
func (u *datagrams) failed(c *udpClient) {
	u.w.engine.failed(c.listener.target, c.endpoint)
	u.drop(c)
}

func (u *datagrams) drop(c *udpClient) {
	_ = unix.Close(c.fd)
	u.clients.remove(c.slot)
	u.idle.Remove(c.element)
	delete(u.byClient, c.key)
	u.w.leave(1)
	u.w.engine.count.udpClients.Add(-1)
}

func (u *datagrams) dropClients(l *Listener) {
	for _, c := range u.byClient {
		if c.listener == l {
			u.drop(c)
		}
	}
}

// silent is the client that was silent for the longest time, or nil.
func (u *datagrams) silent() *udpClient {
	if e := u.idle.Front(); e != nil {
		return e.Value.(*udpClient)
	}
	return nil
}

func (u *datagrams) expire() {
	for {
		c := u.silent()
		if c == nil || u.w.now.Sub(c.last) < u.w.engine.cfg.UDPTimeout {
			return
		}
		u.drop(c)
	}
}

// destination reads from the control messages of a datagram to which of this
// node's addresses it was sent.
func destination(oob []byte) netip.Addr {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 16:
			return netip.AddrFrom16([16]byte(m.Data))
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= 8:
			return netip.AddrFrom4([4]byte(m.Data[4:]))
		}
	}
	return netip.Addr{}
}

// source is the control message with which a datagram leaves from a.
func source(a netip.Addr) []byte {
	switch {
	case a.Is4():
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	case a.Is6():
		return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
	}
	return nil
}
