package muxes

import (
	"errors"
	"net/netip"
	"testing"
)

// Nothing of a Pod is left after an attempt that has failed. That it has chosen HTTP/1.1 is known until that is forgotten: the next
// attempt may find that it speaks another version by then.
func TestForgottenPods(t *testing.T) {
	var all Pods
	addr, failure := netip.MustParseAddrPort("192.0.2.1:80"), errors.New("refused")
	a, m, own := all.Begin(addr)
	if other, _, too := all.Begin(addr); !own || too || other != a {
		t.Fatal("two attempts at a time")
	}
	a.Result(failure)
	if all.Finish(addr, m); !errors.Is(a.Wait(), failure) || len(all.pods) > 0 {
		t.Errorf("%v, and %d Pods are left", a.Wait(), len(all.pods))
	}
	_, m, _ = all.Begin(addr)
	all.First(m)
	all.Finish(addr, m)
	if s, first := all.Open(addr, false); s != nil || !first {
		t.Error("the Pod's choice is forgotten")
	}
	if all.Forget(addr); len(all.pods) > 0 {
		t.Error("the Pod's choice is not forgotten")
	}
}
