package dns

import (
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// raw sends bytes over UDP and returns the answer, or nil for none.
func raw(t testing.TB, s *Server, req []byte) []byte {
	t.Helper()
	c, err := net.Dial("udp", s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(req); err != nil {
		t.Fatal(err)
	}
	// A question that is always answered comes behind: when its answer is
	// there, the first one would be.
	last, _ := question("cluster.local.", mdns.TypeSOA).Pack()
	last[0], last[1] = 0xFE, 0xED
	if _, err := c.Write(last); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, maxMessage)
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	if n >= 2 && buf[0] == 0xFE && buf[1] == 0xED {
		return nil
	}
	return buf[:n]
}

func TestBadRequests(t *testing.T) {
	s := start(t, clusterOptions())
	fill(s.Zone(), objects(t))
	const name = "my-service.prod.svc.cluster.local."
	good := func(change func(m *mdns.Msg)) []byte {
		m := question(name, mdns.TypeA)
		change(m)
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	nothing := func(*mdns.Msg) {}
	edit := func(f func(b []byte) []byte) []byte { return f(good(nothing)) }
	long := append(make([]byte, headerSize), strings.Repeat("\x3f"+strings.Repeat("a", 63), 4)...)
	long = append(long, 0, 0, 1, 0, 1)
	long[5] = 1
	for what, c := range map[string]struct {
		req  []byte
		want int // -1: silence
	}{
		"good":              {good(nothing), mdns.RcodeSuccess},
		"empty":             {[]byte{}, -1},
		"short header":      {good(nothing)[:11], -1},
		"response":          {good(func(m *mdns.Msg) { m.Response = true }), -1},
		"header alone":      {edit(func(b []byte) []byte { return b[:12] }), mdns.RcodeFormatError},
		"cut in the name":   {edit(func(b []byte) []byte { return b[:20] }), mdns.RcodeFormatError},
		"cut in the type":   {edit(func(b []byte) []byte { return b[:len(b)-3] }), mdns.RcodeFormatError},
		"no question":       {edit(func(b []byte) []byte { b[5] = 0; return b }), mdns.RcodeFormatError},
		"two questions":     {edit(func(b []byte) []byte { b[5] = 2; return append(b, b[12:]...) }), mdns.RcodeFormatError},
		"many answers":      {edit(func(b []byte) []byte { b[7] = 2; return b }), mdns.RcodeFormatError},
		"missing record":    {edit(func(b []byte) []byte { b[11] = 1; return b }), mdns.RcodeFormatError},
		"pointer to itself": {edit(func(b []byte) []byte { b[12], b[13] = 0xC0, 12; return b }), mdns.RcodeFormatError},
		"pointer ahead":     {edit(func(b []byte) []byte { b[12], b[13] = 0xC0, 40; return b }), mdns.RcodeFormatError},
		"label type 01":     {edit(func(b []byte) []byte { b[12] = 0x41; return b }), mdns.RcodeFormatError},
		"name too long":     {long, mdns.RcodeFormatError},
		// What follows the empty label is taken for type and class.
		"empty label":   {edit(func(b []byte) []byte { b[12+1+len("my-service")] = 0; return b }), mdns.RcodeRefused},
		"status opcode": {good(func(m *mdns.Msg) { m.Opcode = mdns.OpcodeStatus }), mdns.RcodeNotImplemented},
		"update":        {good(func(m *mdns.Msg) { m.Opcode = mdns.OpcodeUpdate }), mdns.RcodeNotImplemented},
		"notify":        {good(func(m *mdns.Msg) { m.Opcode = mdns.OpcodeNotify }), mdns.RcodeNotImplemented},
		"chaos":         {good(func(m *mdns.Msg) { m.Question[0].Qclass = mdns.ClassCHAOS }), mdns.RcodeRefused},
		"class any":     {good(func(m *mdns.Msg) { m.Question[0].Qclass = mdns.ClassANY }), mdns.RcodeRefused},
		"AXFR":          {good(func(m *mdns.Msg) { m.Question[0].Qtype = mdns.TypeAXFR }), mdns.RcodeRefused},
		"IXFR":          {good(func(m *mdns.Msg) { m.SetIxfr("cluster.local.", 1, "a.", "b.") }), mdns.RcodeRefused},
		"EDNS":          {good(func(m *mdns.Msg) { m.SetEdns0(4096, true) }), mdns.RcodeSuccess},
		"EDNS cookie": {good(func(m *mdns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = append(m.IsEdns0().Option, &mdns.EDNS0_COOKIE{Code: mdns.EDNS0COOKIE, Cookie: "24a5ac1122334455"})
		}), mdns.RcodeSuccess},
		"EDNS version 1": {good(func(m *mdns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(1) }), mdns.RcodeBadVers},
		"two EDNS": {good(func(m *mdns.Msg) { m.SetEdns0(1232, false); m.Extra = append(m.Extra, m.Extra[0]) }),
			mdns.RcodeFormatError},
		"OPT with name":        {good(func(m *mdns.Msg) { m.SetEdns0(1232, false); m.Extra[0].Header().Name = "x." }), mdns.RcodeFormatError},
		"tiny EDNS size":       {good(func(m *mdns.Msg) { m.SetEdns0(1, false) }), mdns.RcodeSuccess},
		"rubbish behind":       {append(good(nothing), 1, 2, 3), mdns.RcodeSuccess},
		"outside, no upstream": {good(func(m *mdns.Msg) { m.Question[0].Name = "example.com." }), mdns.RcodeRefused},
	} {
		t.Run(what, func(t *testing.T) {
			out := raw(t, s, c.req)
			if c.want < 0 {
				if out != nil {
					t.Errorf("answered %x", out)
				}
				return
			}
			if out == nil {
				t.Fatal("no answer")
			}
			var r mdns.Msg
			if err := r.Unpack(out); err != nil {
				t.Fatalf("%v in %x", err, out)
			}
			if r.Rcode != c.want || !r.Response || r.Id != binary.BigEndian.Uint16(c.req) || r.Opcode != int(c.req[2]>>3)&15 {
				t.Errorf("want %s, answered %v", mdns.RcodeToString[c.want], &r)
			}
			hadOPT := strings.Contains(what, "EDNS")
			if (r.IsEdns0() != nil) != hadOPT {
				t.Errorf("OPT in the answer: %v", r.IsEdns0())
			}
		})
	}
}

// A label may hold any byte; what comes back is what was asked.
func TestStrangeLabelsComeBack(t *testing.T) {
	s := start(t, clusterOptions())
	for _, name := range []string{`a\.b.svc.cluster.local.`, `\000\255.cluster.local.`, `\@.cluster.local.`, "*.cluster.local.",
		"_.cluster.local."} {
		r := exchange(t, s, "udp", question(name, mdns.TypeA))
		if r.Rcode != mdns.RcodeNameError || r.Question[0].Name != name {
			t.Errorf("%s: %v", name, r)
		}
	}
}

// Answers fit what the client takes; over TCP they are whole.
func TestSizes(t *testing.T) {
	s := start(t, clusterOptions())
	s.Zone().SetService(headless("prod", "many"))
	s.Zone().SetSlice(sliceOf("prod", "many", 200))
	const name = "many.prod.svc.cluster.local."
	for _, c := range []struct {
		network   string
		size      uint16 // of EDNS, 0: none
		typ       uint16
		atMost    int
		truncated bool
	}{
		{"udp", 0, mdns.TypeA, 512, true},
		{"udp", 100, mdns.TypeA, 512, true},
		{"udp", 1232, mdns.TypeA, 1232, true},
		{"udp", 65535, mdns.TypeA, 1232, true},
		{"udp", 1232, mdns.TypeSRV, 1232, true},
		{"tcp", 0, mdns.TypeA, 65535, false},
		{"tcp", 512, mdns.TypeSRV, 65535, false},
	} {
		m := question(name, c.typ)
		if c.size > 0 {
			m.SetEdns0(c.size, false)
		}
		b, _ := m.Pack()
		var out []byte
		if c.network == "udp" {
			out = raw(t, s, b)
		} else {
			r := exchange(t, s, "tcp", m)
			r.Compress = true
			out, _ = r.Pack()
		}
		var r mdns.Msg
		if err := r.Unpack(out); err != nil {
			t.Fatal(err)
		}
		if len(out) > c.atMost || r.Truncated != c.truncated || len(r.Answer) < 10 || !c.truncated && len(r.Answer) != 200 {
			t.Errorf("%+v: %d bytes, truncated %v, %d answers", c, len(out), r.Truncated, len(r.Answer))
		}
	}
}

func TestRoundRobin(t *testing.T) {
	s := start(t, clusterOptions())
	s.Zone().SetService(headless("prod", "many"))
	s.Zone().SetSlice(sliceOf("prod", "many", 4))
	first := map[string]int{}
	for range 40 {
		first[firstA(exchange(t, s, "udp", question("many.prod.svc.cluster.local.", mdns.TypeA)))]++
	}
	if len(first) != 4 {
		t.Errorf("first addresses: %v", first)
	}
	for a, n := range first {
		if n != 10 {
			t.Errorf("%s came first %d times of 40", a, n)
		}
	}
}

// Questions over one connection are answered as they come; those that wait for
// an upstream do not hold up the others.
func TestPipelining(t *testing.T) {
	release := make(chan struct{})
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		<-release
		answerWith("@ 60 IN A 192.0.2.1")(w, m, n)
	})
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	c, err := net.Dial("tcp", s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	conn := &mdns.Conn{Conn: c}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	for i, name := range []string{"slow.example.com.", "cluster.local.", "cluster.local."} {
		m := question(name, mdns.TypeSOA)
		m.Id = uint16(i)
		if err := conn.WriteMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []uint16{1, 2, 0} {
		if i == 2 {
			close(release)
		}
		r, err := conn.ReadMsg()
		if err != nil || r.Id != want {
			t.Fatalf("answer %d is %v, %v", i, r, err)
		}
	}
}

// Both families on the unspecified address: the answer comes from the address
// that was asked.
func TestWildcardAnswersFromTheAddressAsked(t *testing.T) {
	s := start(t, Options{Listen: []string{":0"}})
	for _, l := range s.Addrs() {
		host := "127.0.0.7" // of 127.0.0.0/8, not the one the kernel would choose
		if l.Addr().Is6() {
			host = "::1"
		}
		c, err := net.Dial(network("udp", l), net.JoinHostPort(host, strings.TrimPrefix(l.String()[strings.LastIndex(l.String(), ":"):], ":")))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conn := &mdns.Conn{Conn: c}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if err := conn.WriteMsg(question("cluster.local.", mdns.TypeSOA)); err != nil {
			t.Fatal(err)
		}
		// A connected socket sees only what comes from the address it asked.
		if r, err := conn.ReadMsg(); err != nil || len(r.Answer) != 1 {
			t.Errorf("%s: %v, %v", host, r, err)
		}
	}
}

func TestMetricsAndHealth(t *testing.T) {
	u := startUpstream(t, answerWith("@ 60 IN A 192.0.2.1"))
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	fill(s.Zone(), objects(t))
	eventually(t, "ready", s.Ready)
	for range 3 {
		exchange(t, s, "udp", question("my-service.prod.svc.cluster.local.", mdns.TypeA))
		exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
	}
	exchange(t, s, "tcp", question("nope.cluster.local.", mdns.TypeAAAA))
	h := httptest.NewServer(s.Handler())
	defer h.Close()
	get := func(path string) (int, string) {
		r, err := http.Get(h.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	server := `server="dns://` + s.Addrs()[0].String() + `"`
	var text string
	for _, want := range []string{
		`coredns_dns_requests_total{family="1",proto="udp",` + server + `,type="A",view="",zone="cluster.local."} 3`,
		`coredns_dns_requests_total{family="1",proto="tcp",` + server + `,type="AAAA",view="",zone="cluster.local."} 1`,
		`coredns_dns_requests_total{family="1",proto="udp",` + server + `,type="A",view="",zone="."} 3`,
		`coredns_dns_responses_total{plugin="kubernetes",rcode="NOERROR",` + server + `,view="",zone="cluster.local."} 3`,
		`coredns_dns_responses_total{plugin="kubernetes",rcode="NXDOMAIN",` + server + `,view="",zone="cluster.local."} 1`,
		`coredns_dns_responses_total{plugin="cache",rcode="NOERROR",` + server + `,view="",zone="."} 2`,
		`coredns_dns_responses_total{plugin="forward",rcode="NOERROR",` + server + `,view="",zone="."} 1`,
		`coredns_dns_request_duration_seconds_count{` + server + `,view="",zone="cluster.local."} 4`, // with that over TCP
		`coredns_cache_hits_total{server="dns://",type="success",view="",zones="."} 2`,
		`coredns_cache_entries{server="dns://",type="success",view="",zones="."} 1`,
		`coredns_forward_responses_total{rcode="NOERROR",to="` + u.addr.String() + `"} 1`,
		`coredns_proxy_request_duration_seconds_count{proxy_name="forward",rcode="NOERROR",to="` + u.addr.String() + `"} 1`,
		`fairlead_dns_ready 1`,
	} {
		// A client has its answer a moment before it is counted.
		eventually(t, want, func() bool { _, text = get("/metrics"); return strings.Contains(text, want) })
	}
	for _, path := range []string{"/ready", "/health"} {
		if code, body := get(path); code != 200 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}
