package dns

import (
	"bytes"
	"encoding/binary"
	"net"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// countedConn counts the writes to a connection.
type countedConn struct {
	net.Conn
	writes atomic.Int64
}

func (c *countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// Requests that come in together are answered together, each by its whole
// answer and in their order (RFC 7766, 6.2.1.1), also when all answers are more
// than what is gathered at once.
func TestPipelinedRequestsShareWrites(t *testing.T) {
	s := start(t, clusterOptions())
	fill(s.Zone(), objects(t))
	s.Zone().SetService(headless("prod", "fifty"))
	s.Zone().SetSlice(sliceOf("prod", "fifty", 50))
	const count = 200
	for _, c := range []struct {
		name            string
		records, writes int
	}{
		// 200 requests of some 60 bytes fill the buffer of reads three times.
		{"my-service.prod.svc.cluster.local.", 1, 20},
		// 200 answers of some 850 bytes are eleven times what is gathered.
		{"fifty.prod.svc.cluster.local.", 50, 40},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		accepted, err := l.Accept()
		l.Close()
		if err != nil {
			t.Fatal(err)
		}
		server := &countedConn{Conn: accepted}
		_ = client.SetDeadline(time.Now().Add(30 * time.Second))
		var all bytes.Buffer
		for i := range count {
			m := question(c.name, mdns.TypeA)
			m.Id = uint16(i)
			packed, err := m.Pack()
			if err != nil {
				t.Fatal(err)
			}
			all.Write(binary.BigEndian.AppendUint16(nil, uint16(len(packed))))
			all.Write(packed)
		}
		// All of them are there before the first one is read.
		if _, err := client.Write(all.Bytes()); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			s.serveConn(newTCPConn(server), &workerStats{})
			close(ended)
		}()
		conn := &mdns.Conn{Conn: client}
		for i := range count {
			r, err := conn.ReadMsg()
			if err != nil || int(r.Id) != i || len(r.Answer) != c.records {
				t.Fatalf("%s: answer %d: %v, %v", c.name, i, r, err)
			}
		}
		client.Close()
		<-ended
		server.Close()
		if n := int(server.writes.Load()); n > c.writes {
			t.Errorf("%s: %d answers took %d writes, want at most %d", c.name, count, n, c.writes)
		}
	}
}

// A client that asks without reading what it is answered is cut off; what has
// been gathered for it does not grow.
func TestDeafClientIsCutOff(t *testing.T) {
	client, server := net.Pipe() // takes nothing that is not read
	defer client.Close()
	st := &stream{conn: &shortDeadline{server}}
	defer server.Close()
	for i := 0; ; i++ {
		if !st.add(make([]byte, 1000)) {
			break
		}
		if i > 10*tcpGather/1000 {
			t.Fatal("still taken after ten times what is gathered")
		}
	}
	if st.flush() {
		t.Error("a broken connection is said to be whole")
	}
	if cap(st.out) > 2*tcpGather {
		t.Errorf("%d bytes wait for a client that is gone", cap(st.out))
	}
}

// shortDeadline makes every deadline a past one.
type shortDeadline struct{ net.Conn }

func (c *shortDeadline) SetWriteDeadline(time.Time) error {
	return c.Conn.SetWriteDeadline(time.Unix(1, 0))
}
