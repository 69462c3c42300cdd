package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// udpBuffer is the size asked for a socket's receive buffer: a burst of about
// 2000 questions waits in it.
const udpBuffer = 1 << 20

// listenUDP opens a socket, with shared one that joins others of this server.
func listenUDP(addr netip.AddrPort, anyAddress, shared bool) (*net.UDPConn, error) {
	lc := socket.ListenConfig(addr, socket.Options{AnyAddress: anyAddress, Shared: shared, Destination: addr.Addr().IsUnspecified()})
	pc, err := lc.ListenPacket(context.Background(), network("udp", addr), addr.String())
	if err != nil {
		return nil, err
	}
	conn := pc.(*net.UDPConn)
	// Best effort: the kernel has its own limit.
	_ = conn.SetReadBuffer(udpBuffer)
	return conn, nil
}

func network(base string, addr netip.AddrPort) string {
	if addr.Addr().Is4() {
		return base + "4"
	}
	return base + "6"
}

// udpBatch is how many requests are taken and answered at once when they come
// faster than one by one.
const udpBatch = 16

// serveUDP answers what comes in on one socket until it is closed. Answers
// that are known are sent at once; the others never hold up the loop.
func (s *Server) serveUDP(conn *net.UDPConn, stats *workerStats, wildcard bool) {
	w := s.newWorker(true, stats)
	w.server = conn.LocalAddr().(*net.UDPAddr).AddrPort()
	// Longer requests are cut, which makes them malformed.
	batch, err := socket.NewBatch(conn, udpBatch, maxRequest, wildcard)
	if err != nil {
		s.log.Error("cannot read a socket", "address", conn.LocalAddr(), "err", err)
		return
	}
	outs := make([][]byte, udpBatch)
	for {
		n, err := batch.Receive()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error for an earlier answer
		}
		start := time.Now()
		for i := range n {
			w.out = outs[i]
			s.answerUDP(w, conn, batch, i, start)
			outs[i] = w.out
		}
		if err := batch.Flush(); err != nil {
			return
		}
	}
}

// answerUDP answers one request of a batch, or hands it over.
func (s *Server) answerUDP(w *worker, conn *net.UDPConn, batch *socket.Batch, i int, start time.Time) {
	req := batch.Datagram(i)
	w.family = 1
	if batch.Is4(i) {
		w.family = 0
	}
	what := w.answer(req)
	if what == drop {
		if batch.From(i) != w.server { // see hello
			w.stats.dropped.Add(1)
		}
		return
	}
	asked := what == forward || what == follow
	if asked || s.options.LogQueries || s.options.Questions != nil {
		w.client = clientOf(batch.From(i))
	}
	if asked {
		info, from := append([]byte(nil), batch.Control(i)...), batch.From(i)
		if w.handOver(req, what, func(out []byte) { writeUDP(conn, out, info, from) }) {
			return
		}
	}
	info := batch.Control(i)
	if len(info) > 0 {
		info = socket.AnswerFrom(info)
	}
	batch.Reply(i, w.out, info)
	w.finished(len(req), time.Since(start))
}

// writeUDP sends an answer. An error concerns one client, which asks again.
func writeUDP(conn *net.UDPConn, out, info []byte, to netip.AddrPort) {
	if len(info) == 0 {
		_, _ = conn.WriteToUDPAddrPort(out, to)
		return
	}
	_, _, _ = conn.WriteMsgUDPAddrPort(out, socket.AnswerFrom(info), to)
}
