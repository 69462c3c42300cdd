package svc

import (
	"net/netip"
	"testing"
)

func TestTextForms(t *testing.T) {
	web := Name{Namespace: "prod", Name: "web"}
	for _, c := range []struct {
		got, want string
	}{
		{web.String(), "prod/web"},
		{PortName{Name: web}.String(), "prod/web"},
		{PortName{Name: web, Port: "http"}.String(), "prod/web:http"},
		{Frontend{TCP, netip.MustParseAddrPort("10.96.0.1:443")}.String(), "TCP 10.96.0.1:443"},
		{Frontend{UDP, netip.MustParseAddrPort("[fd00::a]:53")}.String(), "UDP [fd00::a]:53"},
		{SCTP.String(), "SCTP"},
		{Protocol(1).String(), "protocol(1)"},
		{PortRange{30000, 32767}.String(), "30000-32767"},
		{IPv4.String() + IPv6.String(), "IPv4IPv6"},
		{PolicyCluster.String() + PolicyLocal.String(), "ClusterLocal"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestParseName(t *testing.T) {
	if n, err := ParseName("a/b"); err != nil || n != (Name{"a", "b"}) {
		t.Errorf("ParseName(a/b) = %v, %v", n, err)
	}
	for _, bad := range []string{"", "a", "a/", "/b", "a/b/c"} {
		if n, err := ParseName(bad); err == nil {
			t.Errorf("ParseName(%q) = %v, want an error", bad, n)
		}
	}
}

// behaviour 11: protocol defaults to TCP.
func TestParseProtocol(t *testing.T) {
	for s, want := range map[string]Protocol{"": TCP, "TCP": TCP, "UDP": UDP, "SCTP": SCTP} {
		if p, err := ParseProtocol(s); err != nil || p != want {
			t.Errorf("ParseProtocol(%q) = %v, %v", s, p, err)
		}
	}
	if _, err := ParseProtocol("tcp"); err == nil {
		t.Error("lower case is not the API's spelling and must be refused")
	}
}

// behaviour 92: the default node port range.
func TestParsePortRange(t *testing.T) {
	for s, want := range map[string]PortRange{
		"30000-32767": {30000, 32767}, "30000+10": {30000, 30010}, "1-65535": {1, 65535}, "80-80": {80, 80},
	} {
		if r, err := ParsePortRange(s); err != nil || r != want {
			t.Errorf("ParsePortRange(%q) = %v, %v", s, r, err)
		}
	}
	for _, bad := range []string{"", "80", "0-5", "5-4", "1-65536", "65535+1", "a-b", "-5", "5-"} {
		if r, err := ParsePortRange(bad); err == nil {
			t.Errorf("ParsePortRange(%q) = %v, want an error", bad, r)
		}
	}
	r := PortRange{30000, 30001}
	if r.Size() != 2 || !r.Contains(30001) || r.Contains(30002) {
		t.Errorf("size or contains of %v is wrong", r)
	}
}

func TestCompareOrdersByAddressThenPortThenProtocol(t *testing.T) {
	a := Frontend{TCP, netip.MustParseAddrPort("10.0.0.1:80")}
	b := Frontend{UDP, netip.MustParseAddrPort("10.0.0.1:80")}
	c := Frontend{TCP, netip.MustParseAddrPort("10.0.0.2:1")}
	if a.Compare(b) >= 0 || b.Compare(c) >= 0 || a.Compare(a) != 0 {
		t.Error("wrong order")
	}
	if FamilyOf(netip.MustParseAddr("::ffff:1.2.3.4")) != IPv4 || FamilyOf(netip.MustParseAddr("::1")) != IPv6 {
		t.Error("wrong family")
	}
	x, y := PortName{Name{"a", "a"}, "x"}, PortName{Name{"a", "a"}, "y"}
	if x.Compare(y) >= 0 || x.Compare(PortName{Name{"b", "a"}, "a"}) >= 0 {
		t.Error("wrong order of port names")
	}
}

// The text form of a port is read back.
func TestParsePortName(t *testing.T) {
	for _, want := range []PortName{
		{Name: Name{Namespace: "default", Name: "web"}}, {Name: Name{Namespace: "kube-system", Name: "kube-dns"}, Port: "dns-tcp"},
	} {
		if got, err := ParsePortName(want.String()); err != nil || got != want {
			t.Errorf("%s is read as %+v, %v", want, got, err)
		}
	}
	for _, text := range []string{"", "web", "a/b/c:x", "/web", ":80"} {
		if got, err := ParsePortName(text); err == nil {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}
