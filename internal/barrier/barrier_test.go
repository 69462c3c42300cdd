package barrier

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestVersions(t *testing.T) {
	proxy := Serving(ProxyServices, ProxySlices)
	proxy[ProxyServices], proxy[ProxySlices] = 7, 9
	if text := proxy.String(); text != "proxy-services=7,proxy-endpointslices=9" {
		t.Errorf("a report is %q", text)
	}
	for _, text := range []string{proxy.String(), "proxy-services=7,other=1,proxy-endpointslices=9"} {
		if v, ok := ParseReport(text); !ok || v != proxy {
			t.Errorf("%q is read as %v", text, v)
		}
	}
	if v, ok := ParseReport(""); ok || !v.Started() {
		t.Errorf("a node without a report reports %v", v)
	}
	// What is no number, or too large a one, is nothing that a node has reached.
	for _, bad := range []string{"proxy-services=,proxy-endpointslices=9", "proxy-services=18446744073709551615", "proxy-services=-1"} {
		if v, _ := ParseReport(bad); v.Started() || v.Covers(Versions{ProxyServices: 1}) {
			t.Errorf("%q is read as %v", bad, v)
		}
	}
	for _, c := range []struct {
		want string
		ok   bool
	}{
		{"", true},
		{"proxy-services=7", true},
		{"proxy-services=7,proxy-endpointslices=9", true},
		{"proxy-services=8", false},
		{"proxy-services=1,proxy-endpointslices=10", false},
		{"dns-endpointslices=1000", true}, // it does not serve these
	} {
		if got := proxy.Covers(ParseWanted(c.want)); got != c.ok {
			t.Errorf("%v covers %q: %v", proxy, c.want, got)
		}
	}
	both := proxy.Min(Versions{3, 20, 5, 6})
	if both != (Versions{3, 9, 5, 6}) || both.Max(Versions{0, 10}) != (Versions{3, 10, 5, 6}) {
		t.Errorf("the least is %v", both)
	}
	if Serving(DNSServices).Started() || !Serving().Started() {
		t.Error("a node that serves something has programmed nothing yet")
	}
}

// A node that has no kind does not hold others up, whatever is awaited.
func TestProgress(t *testing.T) {
	p := NewProgress(ProxyServices)
	p.Reached(DNSSlices, 5)
	p.Reached(ProxyServices, 0)
	if v, _ := p.get(); v != Serving(ProxyServices) {
		t.Errorf("it has %v", v)
	}
	select {
	case <-p.changed:
		t.Error("nothing has changed")
	default:
	}
	p.Reached(ProxyServices, 5)
	p.Rejected([]string{"b/b", "a/a", "b/b"})
	if v, rejected := p.get(); v[ProxyServices] != 5 || rejected != "a/a,b/b" {
		t.Errorf("it has %v, rejected %q", v, rejected)
	}
	var many []string
	for i := range MaxRejected {
		many = append(many, fmt.Sprintf("a/s%03d", i))
	}
	p.Rejected(many)
	if _, rejected := p.get(); rejected != strings.Join(many, ",") {
		t.Errorf("%d rejected are %q", len(many), rejected)
	}
	p.Rejected(append(slices.Clone(many), "b/b"))
	if _, rejected := p.get(); rejected != strings.Join(many, ",")+",*" {
		t.Errorf("%d rejected are %q", len(many)+1, rejected)
	}
	(*Progress)(nil).Reached(ProxyServices, 1)
	(*Progress)(nil).Rejected(nil)
}

func TestProxied(t *testing.T) {
	for _, c := range []struct {
		labels map[string]string
		want   bool
	}{
		{nil, true},
		{map[string]string{corev1.IsHeadlessService: ""}, false},
		{map[string]string{"service.kubernetes.io/service-proxy-name": "other"}, false},
	} {
		if Proxied(c.labels) != c.want {
			t.Errorf("Proxied(%v) is not %v", c.labels, c.want)
		}
	}
	if n, ok := NodeOf(OwnLease("a.b")); !ok || n != "a.b" {
		t.Errorf("the proxy's Lease is of %q", n)
	}
}
