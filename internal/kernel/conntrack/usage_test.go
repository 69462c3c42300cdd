package conntrack

import (
	"fmt"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The kernel counts what a connection carries while it may, and the client and the endpoint are named.
func TestUsage(t *testing.T) {
	host, ep := setUp(t)
	for _, on := range []bool{false, true} {
		host.Do(func() {
			if on {
				if err := (&Settings{Accounting: true}).Set(); err != nil {
					t.Fatal(err)
				}
			}
			if Accounting() != on {
				t.Errorf("accounting is %t, want %t", Accounting(), on)
			}
		})
		to := map[bool]string{false: "10.96.0.1:53", true: "[fd00:10:96::1]:53"}[on]
		open(t, host, svc.UDP, to)
		found := 0
		host.Do(func() {
			err := EachUsage(t.Context(), func(u *Usage) {
				if u.Protocol != svc.UDP || u.OrigDst != ap(to) {
					return
				}
				found++
				want := uint64(0)
				if on {
					want = 1
				}
				if u.ReplySrc.Addr() != ep.Addr6() && u.ReplySrc.Addr() != ep.Addr4() || !u.Client.IsValid() || u.Sent.Packets != want ||
					on && u.Sent.Bytes != 40+8+1 {
					t.Errorf("%t: %+v", on, u)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
		if found != 1 {
			t.Errorf("%t: found %d connections", on, found)
		}
	}
	c, err := host.Dial(t.Context(), svc.TCP, ap("10.96.0.1:53"))
	if err != nil {
		t.Fatal(err)
	}
	for _, closed := range []bool{false, true} {
		if closed {
			_ = c.Close()
		}
		testbed.Until(t, "the state of the connection", func() error {
			var found []bool
			var err error
			host.Do(func() {
				err = EachUsage(t.Context(), func(u *Usage) {
					if u.Protocol == svc.TCP && u.OrigDst == ap("10.96.0.1:53") {
						found = append(found, u.Closed)
					}
				})
			})
			if err == nil && !slices.Equal(found, []bool{closed}) {
				err = fmt.Errorf("closed is %t, want %t", found, closed)
			}
			return err
		})
	}
}
