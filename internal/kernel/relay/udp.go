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
	element  *list.Element // in worker.idle
}

// fromClients carries datagrams of a listener's clients to their endpoints.
func (w *worker) fromClients(l *Listener) {
	for range datagramsAtOnce {
		n, oobn, _, from, err := unix.Recvmsg(l.fd, w.datagram[:], w.oob, unix.MSG_DONTWAIT)
		if is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		k := udpKey{listener: l.id, client: addrPort(from), destination: destination(w.oob[:oobn])}
		w.toEndpoint(l, k, w.datagram[:n])
	}
}

// toEndpoint sends one datagram. An endpoint that refused an earlier one reports it
// now, and the next one gets it.
func (w *worker) toEndpoint(l *Listener, k udpKey, b []byte) {
	var tried []netip.AddrPort
	for {
		c := w.byClient[k]
		if c != nil && !l.target.Serves(c.endpoint) {
			w.drop(c)
			c = nil
		}
		if c == nil {
			if c = w.newClient(l, k, tried); c == nil {
				return
			}
		}
		c.last = w.now
		w.idle.MoveToBack(c.element)
		n, err := retry(func() (int, error) { return unix.Write(c.fd, b) })
		switch {
		case err == nil:
			w.toEndpoints.Add(int64(n))
			return
		case is(err, unix.EAGAIN), noFiles(err), is(err, unix.EMSGSIZE):
			return // lost on the way, as datagrams are
		}
		tried = append(tried, c.endpoint)
		w.failed(c)
	}
}

// newClient chooses an endpoint; nil if there is none, or no room.
func (w *worker) newClient(l *Listener, k udpKey, tried []netip.AddrPort) *udpClient {
	if !w.room(1) {
		oldest := w.silent()
		if oldest == nil {
			return nil
		}
		w.drop(oldest)
		if !w.room(1) {
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
		c := &udpClient{key: k, listener: l, fd: fd, endpoint: ep, last: w.now}
		if err := unix.Connect(fd, sockaddr(ep)); err != nil {
			_ = unix.Close(fd)
			w.engine.failed(l.target, ep)
			tried = append(tried, ep)
			continue
		}
		c.slot = w.clients.add(c)
		c.element = w.idle.PushBack(c)
		w.byClient[k] = c
		w.engine.count.udpClients.Add(1)
		if w.watch(fd, unix.EPOLLIN, kindUDP, c.slot) != nil {
			w.drop(c)
			return nil
		}
		return c
	}
	w.leave(1)
	return nil
}

// fromEndpoint carries datagrams back to a client.
func (w *worker) fromEndpoint(c *udpClient) {
	for range datagramsAtOnce {
		n, err := retry(func() (int, error) { return unix.Read(c.fd, w.datagram[:]) })
		if is(err, unix.EAGAIN) {
			return
		}
		if err != nil {
			w.failed(c)
			return
		}
		if !c.answered {
			c.answered = true
			c.listener.target.Answered(c.endpoint)
		}
		c.last = w.now
		w.idle.MoveToBack(c.element)
		n, err = unix.SendmsgN(c.listener.fd, w.datagram[:n], source(c.key.destination), sockaddr(c.key.client), unix.MSG_DONTWAIT)
		if err == nil {
			w.toClients.Add(int64(n))
		}
	}
}

// failed ends a client whose endpoint refused a datagram.
func (w *worker) failed(c *udpClient) {
	w.engine.failed(c.listener.target, c.endpoint)
	w.drop(c)
}

func (w *worker) drop(c *udpClient) {
	_ = unix.Close(c.fd)
	w.clients.remove(c.slot)
	w.idle.Remove(c.element)
	delete(w.byClient, c.key)
	w.leave(1)
	w.engine.count.udpClients.Add(-1)
}

func (w *worker) dropClients(l *Listener) {
	for _, c := range w.byClient {
		if c.listener == l {
			w.drop(c)
		}
	}
}

// silent is the client that was silent for the longest time, or nil.
func (w *worker) silent() *udpClient {
	if e := w.idle.Front(); e != nil {
		return e.Value.(*udpClient)
	}
	return nil
}

func (w *worker) expireUDP() {
	for {
		c := w.silent()
		if c == nil || w.now.Sub(c.last) < w.engine.cfg.UDPTimeout {
			return
		}
		w.drop(c)
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
