package speaker

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/link"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// What a speaker reports of its interfaces is what it tells the others.
func TestReportedInterfaces(t *testing.T) {
	l := newLinks(slog.New(slog.DiscardHandler))
	var status v1.SpeakerStatus
	report := func(attrs string) {
		status = v1.SpeakerStatus{}
		reportInterfaces(&status, l.own("n", attrs))
	}
	if report(""); len(status.Interfaces) > 0 {
		t.Errorf("one that may not announce reports %q", status.Interfaces)
	}
	links := []link.Interface{{Name: "eth0", Networks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, {Name: "cali1"}, {Name: "eth1"}}
	if report(encodeLinks(links, false, []string{"eth1"})); !slices.Equal(status.Interfaces, []string{"eth0", "eth1"}) || status.AnyNetwork {
		t.Errorf("%q, any network is %t", status.Interfaces, status.AnyNetwork)
	}
	if report(encodeLinks(links[:1], true, nil)); !slices.Equal(status.Interfaces, []string{"eth0"}) || !status.AnyNetwork {
		t.Errorf("%q, any network is %t", status.Interfaces, status.AnyNetwork)
	}
}
