package request

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func id(n int) string { return fmt.Sprintf("%032x", n) }

// Only a request whose ID is armed is kept, while it is; the others are not looked at once the time is over.
func TestArmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var none *Watch
		if none.Armed() || none.Begin(id(1)) != nil {
			t.Error("a nil Watch traces")
		}
		w := &Watch{}
		for _, wrong := range []string{"", id(0), id(1)[1:], id(1) + "0", strings.Repeat("g", 32), strings.ToUpper(id(0xab))} {
			if err := w.Arm(wrong); !errors.Is(err, ErrID) {
				t.Errorf("%q: %v", wrong, err)
			}
		}
		if w.Armed() || w.Begin(id(1)) != nil {
			t.Error("traces before an ID is armed")
		}
		for n := 1; n <= maxArmed; n++ {
			if err := w.Arm(id(n)); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Arm(id(maxArmed + 1)); !errors.Is(err, ErrFull) {
			t.Errorf("one ID too many: %v", err)
		}
		if err := w.Arm(id(1)); err != nil {
			t.Errorf("the same ID: %v", err)
		}
		if w.Begin(id(maxArmed+1)) != nil {
			t.Error("an ID that is not armed is traced")
		}
		r, late := w.Begin(id(1)), w.Begin(id(2))
		r.Led("shop/cart")
		time.Sleep(time.Second)
		r.End(&End{Front: "shop/gw", Status: 200})
		if list, armed := w.Seen(id(1)); !armed || len(list) != 1 || list[0].Status != 200 || list[0].Took != 1 ||
			list[0].Backend != "shop/cart" {
			t.Errorf("%+v, %t", list, armed)
		}
		if list, armed := w.Seen(id(2)); !armed || len(list) != 0 {
			t.Errorf("another user's request is shown: %+v, %t", list, armed)
		}
		time.Sleep(ArmedFor - time.Second)
		late.End(&End{Status: 200})
		if list, armed := w.Seen(id(1)); armed || len(list) != 0 {
			t.Errorf("after the time: %+v, %t", list, armed)
		}
		if w.Armed() || w.Begin(id(2)) != nil {
			t.Error("traces after the time")
		}
		if err := w.Arm(id(maxArmed + 1)); err != nil {
			t.Errorf("there is no place after the time: %v", err)
		}
	})
}

// What is kept of an ID is bounded, whatever its requests are.
func TestBounds(t *testing.T) {
	w := &Watch{}
	if err := w.Arm(id(1)); err != nil {
		t.Fatal(err)
	}
	pod := func(n int) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80) } //nolint:gosec // small
	long := errors.New(strings.Repeat("é", 1000))
	for range MaxSeen + 1 {
		r := w.Begin(id(1))
		for n := range MaxAttempts + 3 {
			r.Try(pod(n))
			r.Got(pod(n), 0, long)
		}
		r.Decided(long.Error())
		r.Decided("later")
		r.End(&End{Status: 502})
	}
	list, _ := w.Seen(id(1))
	if len(list) != MaxSeen {
		t.Fatalf("%d requests", len(list))
	}
	for i := range list {
		s := &list[i]
		if len(s.Attempts) != MaxAttempts || s.More != 3 || s.Attempts[0].Pod != pod(3) || len(s.Why) > maxText+3 || s.Why == "later" ||
			len(s.Attempts[0].Error) > maxText+3 {
			t.Errorf("%+v", s)
		}
	}
	if w.Begin(id(1)) != nil {
		t.Error("a further request is traced")
	}
}
