package socket_test

import (
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Everything that is sent is answered to where it came from, however it falls
// into batches, in both families; a client that is gone costs no other client an
// answer.
func TestEcho(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		pc, err := net.ListenPacket("udp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conn := pc.(*net.UDPConn)
		b, err := socket.NewBatch(conn, 8, 100, false)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			outs := make([][]byte, 8)
			for {
				n, err := b.Receive()
				if errors.Is(err, net.ErrClosed) {
					ended <- nil
					return
				}
				if err != nil {
					continue // about a client that is gone
				}
				for i := range n {
					outs[i] = fmt.Appendf(outs[i][:0], "%s %s %t", b.Datagram(i), b.From(i), b.Is4(i))
					b.Reply(i, outs[i], nil)
				}
				if err := b.Flush(); err != nil {
					ended <- err
					return
				}
			}
		}()
		const clients, asks = 5, 40
		for c := range clients {
			gone, err := net.Dial("udp", conn.LocalAddr().String())
			if err != nil {
				t.Fatal(err)
			}
			client, err := net.Dial("udp", conn.LocalAddr().String())
			if err != nil {
				t.Fatal(err)
			}
			if err := client.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
				t.Fatal(err)
			}
			want := map[string]bool{}
			for i := range asks {
				if i == asks/2 {
					_, _ = gone.Write([]byte("gone"))
					gone.Close()
				}
				ask := fmt.Sprintf("%d-%d", c, i)
				want[fmt.Sprintf("%s %s %t", ask, client.LocalAddr(), addr[0] != '[')] = true
				if _, err := client.Write([]byte(ask)); err != nil {
					t.Fatal(err)
				}
			}
			buf := make([]byte, 200)
			for range asks {
				n, err := client.Read(buf)
				if err != nil {
					t.Fatalf("%d answers are missing: %v", len(want), err)
				}
				if !want[string(buf[:n])] {
					t.Fatalf("answer %q", buf[:n])
				}
				delete(want, string(buf[:n]))
			}
			client.Close()
		}
		conn.Close()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}
