package zone_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

func headless(z *zone.Zone, name string, endpoints int) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}}
	s.Spec.ClusterIP = "None"
	z.SetService(s)
	e := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name,
		Labels: map[string]string{zone.ServiceNameLabel: name}}}
	a := netip.MustParseAddr("10.1.0.1")
	for range endpoints {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
		a = a.Next()
	}
	port, number := "http", int32(80)
	e.Ports = []discoveryv1.EndpointPort{{Name: &port, Port: &number}}
	z.SetSlice(e)
}

// Whatever the limit: the answer fits it, is readable, holds as much as it
// can, and says when that is not all.
func TestLimits(t *testing.T) {
	z := testZone(t)
	for _, n := range []int{1, 2, 50, 1000, 5000} {
		headless(z, fmt.Sprint("h", n), n)
		for _, typ := range []uint16{dns.TypeA, dns.TypeSRV} {
			for _, limit := range []int{512, 513, 1221, 1232, 4096, 65535} {
				m := ask(t, z, fmt.Sprintf("h%d.prod.svc.cluster.local.", n), typ, limit)
				if m.Truncated != (len(m.Answer) < n) {
					t.Errorf("%d endpoints, limit %d: truncated %v with %d answers", n, limit, m.Truncated, len(m.Answer))
				}
				if typ == dns.TypeA && m.Truncated && (limit-len(m.Answer)*16 > 12+255+4+16) {
					t.Errorf("%d endpoints, limit %d: only %d answers", n, limit, len(m.Answer))
				}
				if !m.Truncated && typ == dns.TypeSRV && limit == 65535 && n <= 50 && len(m.Extra) != n {
					t.Errorf("%d endpoints: %d addresses in the additional section", n, len(m.Extra))
				}
				if len(m.Answer) == 0 {
					t.Errorf("%d endpoints, limit %d: nothing", n, limit)
				}
			}
		}
	}
}

// A long chain of ExternalNames never goes beyond the limit.
func TestChainLimits(t *testing.T) {
	z := testZone(t)
	label := strings.Repeat("l", 60)
	for i := range 10 {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: label, Name: fmt.Sprint(label, i)}}
		s.Spec.Type = corev1.ServiceTypeExternalName
		s.Spec.ExternalName = fmt.Sprintf("%s%d.%s.svc.cluster.local", label, i+1, label)
		z.SetService(s)
	}
	for limit := 512; limit < 2000; limit += 7 {
		for _, typ := range []uint16{dns.TypeA, dns.TypeSRV, dns.TypeTXT} {
			ask(t, z, fmt.Sprintf("%s0.%s.svc.cluster.local.", label, label), typ, limit)
			ask(t, z, fmt.Sprintf("%s7.%s.svc.cluster.local.", label, label), typ, limit)
		}
	}
}

// A chain of ExternalNames that comes back to one of its names has each CNAME once.
func TestChainThatLoops(t *testing.T) {
	z := testZone(t)
	for name, target := range map[string]string{"self": "SELF", "a": "b", "b": "a", "lead": "a"} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}}
		s.Spec.Type = corev1.ServiceTypeExternalName
		s.Spec.ExternalName = target + ".prod.svc.cluster.local"
		z.SetService(s)
	}
	for name, n := range map[string]int{"self": 1, "a": 2, "b": 2, "lead": 3} {
		m := ask(t, z, name+".prod.svc.cluster.local.", dns.TypeA, 512)
		if m.Rcode != dns.RcodeSuccess || len(m.Answer) != n || m.Truncated {
			t.Errorf("%s: %s with %v; want %d CNAMEs", name, dns.RcodeToString[m.Rcode], m.Answer, n)
		}
	}
}

// Each turn another address comes first, and all are always there.
func TestRotation(t *testing.T) {
	z := testZone(t)
	headless(z, "four", 4)
	m := new(dns.Msg)
	m.SetQuestion("four.prod.svc.cluster.local.", dns.TypeA)
	buf, _ := m.Pack()
	firsts := map[byte]int{}
	for i := range uint32(8) {
		q := zone.Question{Type: dns.TypeA, Rotate: i}
		q.Name.ParseWire(buf, 12)
		out, r := z.Answer(append([]byte(nil), buf...), &q, 512)
		if r.Answers != 4 {
			t.Fatalf("%d answers", r.Answers)
		}
		all := map[byte]bool{}
		for k := range 4 {
			all[out[len(buf)+16*k+15]] = true
		}
		if len(all) != 4 {
			t.Errorf("turn %d: %v", i, all)
		}
		firsts[out[len(buf)+15]]++
	}
	if len(firsts) != 4 {
		t.Errorf("first addresses %v", firsts)
	}
}

// Several cluster domains have the same names; each speaks of itself.
func TestSeveralDomains(t *testing.T) {
	z, err := zone.New(zone.Config{Domains: []string{"cluster.local", "k8s.example.com", "sub.cluster.local"}, Serial: 1})
	if err != nil {
		t.Fatal(err)
	}
	load(t, z, "testdata/cluster.yaml")
	for _, c := range []struct{ name, typ, want string }{
		{"dual.prod.svc.k8s.example.com.", "A", "10.96.0.30"},
		{"_http._tcp.dual.prod.svc.k8s.example.com.", "SRV", "80 dual.prod.svc.k8s.example.com."},
		{"_http._tcp.dual.prod.svc.cluster.local.", "SRV", "80 dual.prod.svc.cluster.local."},
		{"dual.prod.svc.sub.cluster.local.", "A", "10.96.0.30"},
		{"nope.sub.cluster.local.", "A", "authority sub.cluster.local."},
		{"nope.k8s.example.com.", "A", "authority k8s.example.com."},
		{"k8s.example.com.", "SOA", "ns.dns.k8s.example.com."},
		{"30.0.96.10.in-addr.arpa.", "PTR", "dual.prod.svc.cluster.local."},
		{"ext-in.prod.svc.k8s.example.com.", "A", "dual.prod.svc.cluster.local. 5 IN A 10.96.0.30"},
		{"10-1-2-3.prod.pod.k8s.example.com.", "A", "10.1.2.3"},
	} {
		if got := text(ask(t, z, c.name, dns.StringToType[c.typ], 512)); !strings.Contains(got, c.want) {
			t.Errorf("%s %s:\n%swant %s", c.name, c.typ, got, c.want)
		}
	}
}

func TestPodModes(t *testing.T) {
	pod := func(phase corev1.PodPhase, ips ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "web-0"}}
		p.Status.Phase = phase
		for _, ip := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		return p
	}
	verified, err := zone.New(zone.Config{Domains: []string{"cluster.local"}, Pods: zone.PodsVerified})
	if err != nil {
		t.Fatal(err)
	}
	verified.SetNamespace("prod")
	verified.SetNamespace("other")
	ok := func(name string) bool {
		return ask(t, verified, name, dns.TypeA, 512).Rcode == dns.RcodeSuccess
	}
	const v4, v6, elsewhere = "10-1-2-3.prod.pod.cluster.local.", "fd00--1.prod.pod.cluster.local.", "10-1-2-3.other.pod.cluster.local."
	if ok(v4) {
		t.Error("an address no pod has is answered")
	}
	verified.SetPod(pod(corev1.PodRunning, "10.1.2.3", "fd00::1"))
	if !ok(v4) || !ok(v6) || ok(elsewhere) {
		t.Error("the pod's addresses are not answered, or in another namespace")
	}
	verified.SetPod(pod(corev1.PodRunning, "10.1.2.4"))
	if ok(v4) || len(verified.Pods()) != 1 {
		t.Error("an address the pod has no more is answered")
	}
	verified.SetPod(pod(corev1.PodSucceeded, "10.1.2.3"))
	if ok(v4) {
		t.Error("a pod that has ended is answered")
	}
	verified.SetPod(pod(corev1.PodRunning, "10.1.2.3"))
	verified.DeletePod(svc.Name{Namespace: "prod", Name: "web-0"})
	if ok(v4) || len(verified.Pods()) != 0 {
		t.Error("a deleted pod is answered")
	}

	disabled, err := zone.New(zone.Config{Domains: []string{"cluster.local"}, Pods: zone.PodsDisabled})
	if err != nil {
		t.Fatal(err)
	}
	disabled.SetNamespace("prod")
	for _, name := range []string{v4, "prod.pod.cluster.local.", "pod.cluster.local."} {
		if m := ask(t, disabled, name, dns.TypeA, 512); m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: %v", name, m)
		}
	}
	for m := zone.PodsInsecure; m <= zone.PodsDisabled; m++ {
		if p, err := zone.ParsePodMode(m.String()); err != nil || p != m {
			t.Errorf("ParsePodMode(%s) = %v, %v", m, p, err)
		}
	}
	if _, err := zone.ParsePodMode("off"); err == nil || !strings.Contains(err.Error(), "insecure, verified, disabled") {
		t.Errorf("error %v", err)
	}
}

// behaviour 153: a Service may become and cease to be an ExternalName.
func TestTypeChanges(t *testing.T) {
	z := testZone(t)
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "moves"}}
	s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "db.example.com"
	z.SetService(s)
	step := func(want string) {
		t.Helper()
		if got := text(ask(t, z, "moves.prod.svc.cluster.local.", dns.TypeA, 512)); !strings.Contains(got, want) {
			t.Errorf("want %s in\n%s", want, got)
		}
	}
	step("CNAME db.example.com.")
	s.Spec = corev1.ServiceSpec{ClusterIP: "10.96.7.7"}
	z.SetService(s)
	step("A 10.96.7.7")
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "db.example.com."}
	z.SetService(s)
	step("CNAME db.example.com.")
	z.DeleteService(svc.Name{Namespace: "prod", Name: "moves"})
	step("NXDOMAIN")
}

func TestConfigRefused(t *testing.T) {
	for _, c := range []zone.Config{{}, {Domains: []string{""}}, {Domains: []string{"a..b"}},
		{Domains: []string{"x"}, Reverse: []netip.Prefix{{}}}} {
		if _, err := zone.New(c); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

// FuzzName: the parser accepts what the DNS library accepts as a name of a
// question, and reads it the same way.
func FuzzName(f *testing.F) {
	for _, s := range []string{"\x03www\x07Example\x03com\x00", "\x00", "\xC0\x0C", "\x40", "\x01", "\x02a.\x01\\\x00",
		strings.Repeat("\x01a", 127) + "\x00", strings.Repeat("\x01a", 128) + "\x00"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		var n zone.Name
		end, ok := n.ParseWire(wire, 0)
		text, off, err := dns.UnpackDomainName(wire, 0)
		pointer := err == nil && off != wireLen(wire)
		if ok != (err == nil && !pointer) {
			t.Fatalf("%x: accepted %v, the library says %v (pointer %v)", wire, ok, err, pointer)
		}
		if !ok {
			return
		}
		if end != off || n.Labels() != dns.CountLabel(text) {
			t.Errorf("%x: %d bytes, %d labels; the library says %d, %d", wire, end, n.Labels(), off, dns.CountLabel(text))
		}
		if want := lowerASCII(wire[:end]); string(n.Wire()) != want {
			t.Errorf("%x became %x", wire, n.Wire())
		}
	})
}

// wireLen is the length of an uncompressed name, or -1.
func wireLen(w []byte) int {
	for i := 0; i < len(w); i += 1 + int(w[i]) {
		if w[i] == 0 {
			return i + 1
		}
		if w[i] > 63 {
			return -1
		}
	}
	return -1
}

func lowerASCII(b []byte) string {
	out := append([]byte(nil), b...)
	for i, c := range out {
		if 'A' <= c && c <= 'Z' {
			out[i] = c + 0x20
		}
	}
	return string(out)
}

func TestNameText(t *testing.T) {
	for in, want := range map[string]string{"": ".", ".": ".", "a": "a.", "A.b.": "a.b.", strings.Repeat("a", 63): strings.Repeat("a", 63) +
		"."} {
		var n zone.Name
		if err := n.ParseText(in); err != nil || n.String() != want {
			t.Errorf("%q became %q, %v", in, n.String(), err)
		}
	}
	for _, bad := range []string{"a..b", "..", ".a", strings.Repeat("a", 64), `a\.b`, strings.Repeat("a.", 128)} {
		var n zone.Name
		if err := n.ParseText(bad); err == nil {
			t.Errorf("%q is accepted as %s", bad, n.String())
		}
	}
}
