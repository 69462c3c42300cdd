package speaker

import (
	"fmt"
	"testing"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
)

// What a controller waits for is written at once, and nothing else is. The status has the addresses of Gateways that this node
// announces, and does not change for them while they stay.
func TestPromptStatus(t *testing.T) {
	t.Parallel()
	status := func(version string, announces ...string) (s v1.SpeakerStatus) {
		s.Endpoints, s.Gateways = []string{"192.0.2.9:10262"}, &v1.ServedGateways{Served: []v1.ServedGateway{
			{Name: "shop/front", Version: version, Addresses: []string{"192.0.2.1", "192.0.2.2"}},
		}}
		for _, a := range announces {
			s.Addresses = append(s.Addresses, v1.AnnouncedAddress{Address: a})
		}
		return s
	}
	all := speakerStatus{soon: loop.NewSignal()}
	for _, c := range []struct {
		what             string
		next             v1.SpeakerStatus
		outdated, prompt bool
		announced        string
	}{
		{"the first", status("1"), true, true, "[]"},
		{"the same", status("1"), false, false, "[]"},
		{"an announced address", status("1", "192.0.2.2"), false, true, "[192.0.2.2]"},
		{"another address", status("1", "192.0.2.2", "192.0.2.7"), false, false, "[192.0.2.2]"},
		{"another version", status("2", "192.0.2.2"), true, true, "[192.0.2.2]"},
	} {
		if got := all.outdated(&c.next); got != c.outdated {
			t.Errorf("%s: outdated %t", c.what, got)
		}
		addAnnounced(&c.next)
		all.prompt = false
		if all.set(c.next); all.prompt != c.prompt {
			t.Errorf("%s: prompt %t", c.what, all.prompt)
		}
		if got := fmt.Sprint(all.last().Gateways.Served[0].Announced); got != c.announced {
			t.Errorf("%s: announces %s, want %s", c.what, got, c.announced)
		}
	}
}
