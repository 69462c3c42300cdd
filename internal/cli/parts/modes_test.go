package parts

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/testbed"
)

// behaviour 59: where IPVS does not work another mode is used and the reason is
// logged, unless --mode-strict is given.
func TestFallbackOfIPVS(t *testing.T) {
	if c, err := ipvs.Dial(); err == nil {
		_ = c.Close()
		t.Skip("this kernel has IPVS: nothing to fall back from")
	} else if !errors.Is(err, ipvs.ErrNotSupported) {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	f := &ProxyFlags{mode: "ipvs", variant: "auto"}
	f.ipvs.scheduler = "rr"
	setup := &modeSetup{flags: f, log: slog.New(slog.NewTextHandler(&logged, nil))}
	mode, reason, err := f.chooseMode(t.Context(), setup)
	if err != nil || mode.name != "iptables" && mode.name != "nft" {
		t.Fatalf("mode %q, %v", mode.name, err)
	}
	for _, text := range []string{logged.String(), reason} {
		if !strings.Contains(text, "proxy mode "+mode.name+" is used") || !strings.Contains(text, "the kernel has no IPVS") {
			t.Errorf("logged or returned %q", text)
		}
	}
	f.ipvs.strict = true
	_, reason, err = f.chooseMode(t.Context(), setup)
	if !errors.Is(err, ipvs.ErrNotSupported) || !strings.Contains(err.Error(), "--mode-strict") || reason != "" {
		t.Errorf("with --mode-strict: %q, %v", reason, err)
	}
}

// Modes that keep connections to ClusterIPs from routes say so.
func TestNoMesh(t *testing.T) {
	for mode, want := range map[string]string{
		"nft": "", "userspace": "", "iptables": "is in mode iptables, whose", "ipvs": "is in mode ipvs, which",
	} {
		var f ProxyFlags
		if got := f.NoMesh(mode); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%s: %q, want %q", mode, got, want)
		}
	}
	for _, m := range proxyModes() {
		if (m.noMesh == "") != (m.present == nil) {
			t.Errorf("mode %s cannot be found, or need not be", m.name)
		}
	}
}

// The first candidate that works is chosen, each is probed at most once, and an
// error has the reasons of all.
func TestChoose(t *testing.T) {
	var probed []string
	mode := func(name string, err error) proxyMode {
		return proxyMode{name: name, probe: func(context.Context, *modeSetup) error {
			probed = append(probed, name)
			return err
		}}
	}
	noA, noB := errors.New("no module a"), errors.New("no module b")
	m, skipped, err := new(modeSetup).choose(t.Context(), []proxyMode{mode("a", noA), mode("b", noB), mode("c", nil), mode("d", nil)})
	if err != nil || m.name != "c" || !errors.Is(skipped, noA) || !errors.Is(skipped, noB) {
		t.Errorf("mode %q, skipped %v, %v", m.name, skipped, err)
	}
	if !slices.Equal(probed, []string{"a", "b", "c"}) {
		t.Errorf("probed %q", probed)
	}
	if m, skipped, err = new(modeSetup).choose(t.Context(), []proxyMode{mode("a", nil), mode("b", noB)}); err != nil || skipped != nil ||
		m.name != "a" {
		t.Errorf("mode %q, skipped %v, %v", m.name, skipped, err)
	}
	if _, _, err = new(modeSetup).choose(t.Context(), []proxyMode{mode("a", noA), mode("b", noB)}); !errors.Is(err, noA) ||
		!errors.Is(err, noB) {
		t.Errorf("none works: %v", err)
	}
}

func TestCandidateModes(t *testing.T) {
	for value, want := range map[string]string{
		"auto": "nft iptables", "nft": "nft", "iptables": "iptables", "ipvs": "ipvs iptables nft", "userspace": "userspace", "x": "", "": "",
	} {
		var got []string
		for _, m := range candidateModes(value) {
			if m.probe == nil || m.open == nil || m.cleanup == nil {
				t.Errorf("mode %q lacks a function", m.name)
			}
			got = append(got, m.name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("--mode %s tries %q, want %q", value, got, want)
		}
	}
}

// A mode that does not keep other machines from 127.0.0.0/8 has it routed no longer than the
// mode before it, whose rules go.
func TestLoopbackIsClosedWithItsGuard(t *testing.T) {
	const routed = "net/ipv4/conf/all/route_localnet"
	host := testbed.NewNetwork(t).Outside("node")
	for _, tt := range []struct{ keep, want string }{{"nft", "1"}, {"iptables", "1"}, {"ipvs", "0"}, {"userspace", "0"}, {"", "0"}} {
		var got string
		var err error
		host.Do(func() {
			err = errors.Join(sysctl.Set(routed, "1"), closeLoopback(tt.keep))
			got = sysctl.Value(routed)
		})
		if err != nil || got != tt.want {
			t.Errorf("%v; %s is %s beside mode %q, want %s", err, routed, got, tt.keep, tt.want)
		}
	}
}
