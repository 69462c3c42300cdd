package node

import (
	"slices"
	"testing"
)

// The end is in reverse order: DNS drains for --dns-lameduck, then the speaker ends, and then the proxy. No
// component that ends after the speaker takes seconds.
func TestSpeakerEndsAfterDNS(t *testing.T) {
	for _, early := range []bool{false, true} {
		var names []string
		for _, p := range (&builder{Flags: &Flags{}, Setup: Setup{Early: early}}).order() {
			if p.wanted {
				names = append(names, p.name)
			}
		}
		at := func(name string) int { return slices.Index(names, name) }
		pods := "pods"
		if early {
			pods = "pods of the API server"
		}
		if at("proxy") < 0 || at("proxy") > at("speaker") || at("speaker") > at("dns") || at("dns") > at(pods) {
			t.Errorf("the order to start is %q", names)
		}
	}
}
