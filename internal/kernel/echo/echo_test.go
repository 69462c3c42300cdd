package echo_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/echo"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// A machine answers with what it was asked, over both families; an address without a machine does not. Requests
// that the machine itself gets, and errors, do not reach the socket.
func TestEcho(t *testing.T) {
	network := testbed.NewNetwork(t)
	here, there := network.Outside("here"), network.Outside("there")
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		open := func(h *testbed.Host) (c *echo.Conn) {
			var err error
			h.Do(func() { c, err = echo.Open(f) })
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		c, other := open(here), open(there)
		type reply struct {
			from netip.Addr
			m    echo.Message
			err  error
		}
		receive := func(c *echo.Conn) <-chan reply {
			got := make(chan reply, 100)
			go func() {
				defer close(got)
				for {
					from, m, err := c.Receive()
					if errors.Is(err, net.ErrClosed) {
						return
					}
					got <- reply{from, m, err}
				}
			}()
			return got
		}
		got, overheard := receive(c), receive(other)
		m := echo.Message{ID: 7, Seq: 9, Nonce: 0x0102030405060708}
		answered := func(to netip.Addr) error {
			m.Nonce++
			_ = c.Send(to, m) // the address may not be usable yet
			limit := time.After(100 * time.Millisecond)
			for {
				select {
				case r := <-got:
					if r.err == nil && r.m.Nonce < m.Nonce {
						continue // to an earlier request
					}
					if r.err != nil || r.from != to || r.m != m {
						t.Errorf("%s: got %v from %s, %v; want %v", to, r.m, r.from, r.err, m)
					}
					return nil
				case <-limit:
					return errors.New("no reply")
				}
			}
		}
		testbed.Until(t, "a reply", func() error { return answered(there.Addr(f)) })
		unused := map[svc.Family]string{svc.IPv4: "192.168.77.250", svc.IPv6: "fd00:77::250"}[f]
		if answered(netip.MustParseAddr(unused)) == nil {
			t.Error("an address that no machine has answers")
		}
		if err := errors.Join(c.Close(), other.Close()); err != nil {
			t.Fatal(err)
		}
		for r := range overheard {
			t.Errorf("the machine that was asked received %v from %s, %v", r.m, r.from, r.err)
		}
	}
}
