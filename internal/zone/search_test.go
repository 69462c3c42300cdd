package zone_test

import (
	"testing"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/zone"
)

// Which names are taken for one made by a pod's search path, and where it leads.
func TestSearch(t *testing.T) {
	z := testZone(t)
	for _, c := range []struct {
		name   string
		typ    uint16
		off    bool // search not asked for
		kind   zone.Kind
		rcode  uint8
		target string
		inside bool // the answer is that for a name of the zone
		n      uint16
	}{
		{name: "www.example.com.prod.svc.cluster.local.", typ: dns.TypeA, kind: zone.Searched, target: "www.example.com.", n: 1},
		{name: "www.example.com.prod.svc.cluster.local.", typ: dns.TypeAAAA, kind: zone.Searched, target: "www.example.com.", n: 1},
		{name: "www.example.com.prod.svc.cluster.local.", typ: dns.TypeA, off: true, rcode: zone.RcodeNXDomain},
		{name: "www.example.com.prod.svc.cluster.local.", typ: dns.TypeMX, rcode: zone.RcodeNXDomain},
		{name: "example.com.prod.svc.cluster.local.", typ: dns.TypeA, kind: zone.Searched, target: "example.com.", n: 1},
		{name: "com.prod.svc.cluster.local.", typ: dns.TypeA, rcode: zone.RcodeNXDomain},
		{name: "www.example.com.nowhere.svc.cluster.local.", typ: dns.TypeA, rcode: zone.RcodeNXDomain},
		{name: "www.example.com.prod.xyz.cluster.local.", typ: dns.TypeA, rcode: zone.RcodeNXDomain},
		{name: "192.0.2.prod.svc.cluster.local.", typ: dns.TypeA, rcode: zone.RcodeNXDomain},
		{name: "x.prod.svc.cluster.local.prod.svc.cluster.local.", typ: dns.TypeA, rcode: zone.RcodeNXDomain},
		{name: "dual.prod.empty.svc.cluster.local.", typ: dns.TypeA, inside: true, n: 2},
		{name: "dual.prod.empty.svc.cluster.local.", typ: dns.TypeAAAA, inside: true, n: 2},
		{name: "six.prod.empty.svc.cluster.local.", typ: dns.TypeAAAA, inside: true, n: 2},
		{name: "dual.prod.svc.empty.svc.cluster.local.", typ: dns.TypeA, inside: true, n: 2},
	} {
		m := new(dns.Msg)
		m.SetQuestion(c.name, c.typ)
		buf, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		q := zone.Question{Type: c.typ, Search: !c.off}
		q.Name.ParseWire(buf, 12)
		_, r := z.Answer(buf, &q, 512)
		target := ""
		if r.Target != nil {
			target = r.Target.String()
		}
		bySearch := c.inside || c.kind == zone.Searched
		if r.Kind != c.kind || r.Rcode != c.rcode || target != c.target || r.BySearch != bySearch || r.Answers != c.n {
			t.Errorf("%s %s: %+v with target %q, want %+v", c.name, dns.TypeToString[c.typ], r, target, c)
		}
	}
}

// A CNAME that has no room ends the search, and an exact fit is enough.
func TestSearchLimit(t *testing.T) {
	z := testZone(t)
	m := new(dns.Msg)
	m.SetQuestion("www.example.com.prod.svc.cluster.local.", dns.TypeA)
	buf, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	need := len(buf) + 12 + len("\x03www\x07example\x03com\x00")
	for limit, want := range map[int]zone.Kind{need: zone.Searched, need - 1: zone.Answered} {
		q := zone.Question{Type: dns.TypeA, Search: true}
		q.Name.ParseWire(buf, 12)
		if out, r := z.Answer(append([]byte(nil), buf...), &q, limit); r.Kind != want || len(out) > limit {
			t.Errorf("limit %d: %+v in %d bytes, want kind %d", limit, r, len(out), want)
		}
	}
}

// A pod's addresses are those of status.podIPs, else status.podIP, and none once
// it has come to its end.
func TestVerifiedPods(t *testing.T) {
	z, err := zone.New(zone.Config{Domains: []string{"cluster.local"}, Pods: zone.PodsVerified})
	if err != nil {
		t.Fatal(err)
	}
	z.SetNamespace("prod")
	p := &corev1.Pod{}
	p.Namespace, p.Name = "prod", "p"
	check := func(when string, want map[string]bool) {
		t.Helper()
		for name, there := range want {
			m := ask(t, z, name+".prod.pod.cluster.local.", dns.TypeA, 512)
			if (m.Rcode == dns.RcodeSuccess && len(m.Answer) == 1) != there {
				t.Errorf("%s: %s %s with %v, want it there: %v", when, name, dns.RcodeToString[m.Rcode], m.Answer, there)
			}
		}
	}
	p.Status.PodIP = "10.244.1.7"
	z.SetPod(p)
	z.SetPod(p)
	check("podIP alone", map[string]bool{"10-244-1-7": true, "10-244-1-8": false})
	p = p.DeepCopy()
	p.Status.PodIPs = []corev1.PodIP{{IP: "10.244.1.8"}}
	z.SetPod(p)
	check("podIPs", map[string]bool{"10-244-1-7": false, "10-244-1-8": true})
	p = p.DeepCopy()
	p.Status.Phase = corev1.PodSucceeded
	z.SetPod(p)
	check("ended", map[string]bool{"10-244-1-8": false})
}
