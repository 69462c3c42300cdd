package zone_test

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

var update = flag.Bool("update", false, "rewrite testdata/questions.txt with the answers given; read the difference")

// load enters the objects of a YAML file into z.
func load(t testing.TB, z *zone.Zone, file string) {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(raw), "\n---\n") {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatal(err)
		}
		switch kind.Kind {
		case "Namespace":
			z.SetNamespace(object[corev1.Namespace](t, doc).Name)
		case "Service":
			z.SetService(object[corev1.Service](t, doc))
		case "EndpointSlice":
			z.SetSlice(object[discoveryv1.EndpointSlice](t, doc))
		default:
			t.Fatalf("unknown kind %q", kind.Kind)
		}
	}
}

func object[T any](t testing.TB, doc string) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict([]byte("apiVersion: v1\n"+doc), o); err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	return o
}

func testZone(t testing.TB) *zone.Zone {
	t.Helper()
	z, err := zone.New(zone.Config{
		Domains: []string{"cluster.local"},
		Reverse: []netip.Prefix{
			netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112"),
			netip.MustParsePrefix("10.244.0.0/14"), netip.MustParsePrefix("fd00:10:244::/56"),
		},
		NameServer: svc.Name{Namespace: "kube-system", Name: "kube-dns"},
		Serial:     1,
	})
	if err != nil {
		t.Fatal(err)
	}
	load(t, z, "testdata/cluster.yaml")
	return z
}

// ask puts a question to the zone and returns the answer as a message.
func ask(t testing.TB, z *zone.Zone, name string, typ uint16, limit int) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	buf, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q := zone.Question{Type: typ}
	if _, ok := q.Name.ParseWire(buf, 12); !ok {
		t.Fatalf("%s is no name", name)
	}
	out, r := z.Answer(buf, &q, limit)
	if len(out) > limit {
		t.Errorf("%s: %d bytes, more than the limit of %d", name, len(out), limit)
	}
	if r.Kind == zone.NotOurs {
		return nil
	}
	out[3] = r.Rcode
	out[7], out[9], out[11] = byte(r.Answers), byte(r.Authority), byte(r.Additional)
	out[6], out[8], out[10] = byte(r.Answers>>8), byte(r.Authority>>8), byte(r.Additional>>8)
	reply := new(dns.Msg)
	if err := reply.Unpack(out); err != nil {
		t.Fatalf("%s: the answer cannot be read: %v\n%x", name, err, out)
	}
	if len(reply.Answer) != int(r.Answers) || len(reply.Ns) != int(r.Authority) || len(reply.Extra) != int(r.Additional) {
		t.Errorf("%s: %d, %d and %d records, but the reply says %d, %d and %d", name,
			len(reply.Answer), len(reply.Ns), len(reply.Extra), r.Answers, r.Authority, r.Additional)
	}
	reply.Truncated = r.Truncated
	if got := reply.Len(); reply.Question[0].Name != name && got > 0 {
		t.Errorf("the question came back as %s", reply.Question[0].Name)
	}
	if r.Kind == zone.Elsewhere {
		reply.Extra = append(reply.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: r.Target.String(), Rrtype: dns.TypeTXT, Class: dns.ClassINET},
			Txt: []string{"elsewhere"}})
	}
	return reply
}

// text is an answer the way questions.txt writes it.
func text(m *dns.Msg) string {
	if m == nil {
		return "not ours\n"
	}
	var b strings.Builder
	b.WriteString(dns.RcodeToString[m.Rcode])
	if m.Truncated {
		b.WriteString(" tc")
	}
	b.WriteByte('\n')
	for _, s := range []struct {
		name string
		rrs  []dns.RR
	}{{"", m.Answer}, {"authority ", m.Ns}, {"additional ", m.Extra}} {
		for _, rr := range s.rrs {
			fmt.Fprintf(&b, "%s%s\n", s.name, strings.ReplaceAll(rr.String(), "\t", " "))
		}
	}
	return b.String()
}

// The table of questions is testdata/questions.txt: a line "ask NAME TYPE",
// then the answer. Package dns asks the same through real sockets.
func TestQuestions(t *testing.T) {
	z := testZone(t)
	serial := fmt.Sprint(z.Serial())
	raw, err := os.ReadFile("testdata/questions.txt")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	asked := 0
	for block := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n\n") {
		comment, rest, _ := strings.Cut("\n"+block, "\nask ")
		question, want, _ := strings.Cut(rest, "\n")
		f := strings.Fields(question)
		if len(f) != 2 {
			t.Fatalf("not a question: %q", block)
		}
		asked++
		// The serial number says how often the zone has changed.
		got := strings.ReplaceAll(text(ask(t, z, f[0], dns.StringToType[f[1]], 65535)), " "+serial+" 7200", " SERIAL 7200")
		got = strings.TrimSpace(got)
		if d := cmp.Diff(want, got); d != "" && !*update {
			t.Errorf("%s (-want +got):\n%s", question, d)
		}
		fmt.Fprintf(&out, "%sask %s\n%s\n\n", strings.TrimPrefix(comment+"\n", "\n"), question, got)
	}
	if asked < 200 {
		t.Errorf("only %d questions", asked)
	}
	if *update {
		if err := os.WriteFile("testdata/questions.txt", []byte(strings.TrimSpace(out.String())+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
