package dialect

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func listenersOf(t *testing.T, text string, more ...string) *Reading {
	t.Helper()
	return Read(web(append([]string{tencentListeners, text}, more...)...))
}

// Each parameter with a counterpart has its effect (behaviour 145).
func TestListenerParameters(t *testing.T) {
	r := listenersOf(t, `{"Protocol": "HTTP", "Scheduler": "LEAST_CONN", "IdleConnectTimeout": 900, "MaxConn": 500, "MaxCps": -1,
		"DeregisterTargetRst": true, "SessionExpireTime": 0, "TargetType": "NODE", "SessionType": "NORMAL", "SniSwitch": 0, "ProxyProtocol": true,
		"HealthCheck": {"HealthSwitch": 1, "TimeOut": 3, "IntervalTime": 7, "HealthNum": 4, "UnHealthNum": 5, "HttpCode": 6,
			"HttpCheckPath": "/up", "HttpCheckDomain": "shop.example", "HttpCheckMethod": "HEAD", "CheckPort": 8081, "CheckType": "HTTP",
			"ContextType": null}}`)
	for _, f := range r.Findings {
		if f.State.IsWarning() {
			t.Errorf("%+v", f)
		}
	}
	s := r.Spec
	want := Health{Enabled: true, Protocol: HTTP, Port: 8081, Path: "/up", Host: "shop.example", Method: "HEAD", Healthy: 4, Unhealthy: 5,
		Interval: Duration(7 * time.Second), Timeout: Duration(3 * time.Second), Codes: "http_2xx,http_3xx"}
	if s.Health != want {
		t.Errorf("%+v\nwant\n%+v", s.Health, want)
	}
	if r.Way != Proxied || s.Balance != LeastConnections || s.IdleTimeout.Std() != 15*time.Minute || s.ConnectionLimit != 500 || s.Draining ||
		s.ProxyProtocol != 2 || s.Listeners[0].Protocol != HTTP {
		t.Errorf("%s %+v", r.Way, s)
	}
	if r := listenersOf(t, `{"SessionExpireTime": 60, "Scheduler": "WRR"}`); r.Spec.Balance != SourceHash || r.Invalid() || r.Way != Proxied {
		t.Errorf("%s %+v", r.Way, r.Findings)
	}
	if r := listenersOf(t, `{"SessionExpireTime": 60, "Scheduler": "IP_HASH"}`); r.Spec.Balance != SourceHash || r.Invalid() ||
		slices.Contains(states(r)[tencentListeners], Overridden) {
		t.Errorf("%s %+v", r.Way, r.Findings)
	}
	if r := listenersOf(t, `{"HealthCheck": {"HealthSwitch": 0}}`); r.Spec.Health.Enabled {
		t.Errorf("%+v", r.Findings)
	}
	if r := listenersOf(t, `{"Scheduler": "IP_HASH"}`, lbPrefix+"balance", "random-of-two"); r.Spec.Balance != RandomOfTwo ||
		!slices.Contains(states(r)[tencentListeners], Overridden) {
		t.Errorf("ours comes first: %+v", r.Findings)
	}
	for _, nothing := range []string{"", "{}", `{"HealthCheck": {}}`, `{"HealthCheck": null}`} {
		if r := listenersOf(t, nothing); r.Way != Direct || r.Invalid() || r.Spec.Health != Read(web()).Spec.Health {
			t.Errorf("%s: %s %+v", nothing, r.Way, r.Findings)
		}
	}
}

// What has no counterpart, or is wrong, is a Warning with the path of the parameter. closed: nothing is served before it is right.
func TestListenerParametersWarn(t *testing.T) {
	long := strings.Repeat("9", 100000)
	for _, c := range []struct {
		json   string
		state  State
		says   string
		closed bool
	}{
		{`HealthCheck`, Invalid, `"HealthCheck" is not a JSON object`, true},
		{`{"HealthCheck": {`, Invalid, "is not JSON: unexpected EOF", true},
		{`{"Scheduler": "WRR"} x`, Invalid, "goes on after the JSON object", true},
		{`{"Scheduler": "IP_HASH"}}garbage`, Invalid, "goes on after the JSON object", true},
		{`{"Scheduler": "IP_HASH"}]`, Invalid, "goes on after the JSON object", true},
		{`{"Scheduler": "IP_HASH"}{}`, Invalid, "goes on after the JSON object", true},
		{`[{"Scheduler": "WRR"}]`, Invalid, "is not a JSON object", true},
		{`{"HealthCheck": 1}`, Invalid, `HealthCheck: "1" is not a JSON object`, true},
		{`{"Scheduler": "WRR", "Scheduler": "IP_HASH"}`, Invalid, "Scheduler comes twice", true},
		{`{"Scheduler": "WRR", "scheduler": "IP_HASH"}`, Invalid, "scheduler comes twice, also as Scheduler", true},
		{`{"Certificate": {"SSLMode": "UNIDIRECTIONAL"}, "certificate": {}}`, Invalid, "certificate comes twice, also as Certificate", true},
		{`{"Certificate": {"SSLMode": "MUTUAL", "\u017f\u017flMode": "UNIDIRECTIONAL"}}`, Invalid, "comes twice, also as SSLMode", true},
		{`{"protocol": "HTTPS", "certificate": {"sslMode": "MUTUAL", "certId": "x"}}`, Invalid, "Certificate.CertId: without TLS Secrets", true},
		{`{"protocol": "HTTPS", "certificate": {"sslMode": "MUTUAL"}}`, Invalid, "Certificate.SSLMode: without fairlead.dev/lb-client-ca", true},
		{`{"Certificate.SSLMode": "UNIDIRECTIONAL"}`, Invalid, `write {"Certificate": {"SSLMode": ...}}`, true},
		{`{"Certificates": {"SSLMode": "MUTUAL"}}`, Invalid, "Certificates is no parameter of listeners; is certificate", true},
		{`{"Certificate": {"SSLMod": "MUTUAL"}}`, Invalid, "is certificate.sslmode (in any case) meant?", true},
		{`{"Protocols": "HTTPS"}`, Invalid, "is protocol (in any case) meant?", true},
		{`{"Certificates": {}}`, Unknown, "Certificates is no parameter of listeners", false},
		{`{"certificate.sslmode": "MUTUAL"}`, Invalid, "certificate.sslmode is no parameter of listeners", true},
		{`{"HealthCheck.TimeOut": 3}`, Unknown, `HealthCheck.TimeOut is no parameter of listeners, and has no effect: write ` +
			`{"HealthCheck": {"TimeOut": ...}}`, false},
		{`{"A.B": 3}`, Unknown, "A.B is no parameter of listeners", false},
		{`{"HealthCheck": {"CheckType": "TCP", "HttpCheckPath": "/up"}}`, Overridden, "HealthCheck.HttpCheckPath: health check path /up: " +
			"has no effect, since the health check protocol is tcp", false},
		{`{"HealthCheck": {"TimeOut": 3, "TimeOut": 4}}`, Invalid, "HealthCheck: TimeOut comes twice", true},
		{strings.Repeat("[", 100000), Invalid, "is not a JSON object", true},
		{`{"A": ` + strings.Repeat("[", 100000), Invalid, "is not JSON", true},
		{`{"HealthCheck": {"TimeOut": "3"}}`, Invalid, "HealthCheck.TimeOut: \"3\" is a JSON string, want a number", false},
		{`{"HealthCheck": {"TimeOut": 61}}`, Invalid, "HealthCheck.TimeOut: \"61\" is not a number from 2 to 60 seconds", false},
		{`{"HealthCheck": {"TimeOut": 9, "IntervalTime": 9}}`, Invalid, "must be less than their interval", false},
		{`{"HealthCheck": {"CheckType": "PING"}}`, Invalid, "HealthCheck.CheckType: \"PING\" is not one of grpc, http, https, tcp", false},
		{`{"HealthCheck": {"HttpCode": 32}}`, Invalid, "HealthCheck.HttpCode: \"32\" is not a number from 1 to 31", false},
		{`{"HealthCheck": {"SendContext": "x"}}`, NotYet, "HealthCheck.SendContext: this version does not do it yet; checks send", false},
		{`{"HealthCheck": {"Timeouts": 3}}`, Unknown, "HealthCheck.Timeouts is no parameter of listeners, and has no effect; is " +
			"HealthCheck.TimeOut meant?", false},
		{`{"IdleConnectTimeout": ` + long + `}`, Invalid, "from 10 to 1980 seconds", false},
		{`{"Scheduler": "RANDOM"}`, Invalid, "Scheduler: \"RANDOM\" is not one of ip_hash, least_conn, wrr", false},
		{`{"SessionExpireTime": 5}`, Invalid, "SessionExpireTime: \"5\" is not a number from 30 to 3600 seconds, nor 0", false},
		{`{"EndPort": 90}`, NotYet, "EndPort: this version does not do it yet; the listener has the port", false},
		{`{"MaxCps": 90}`, NotYet, "MaxCps: this version does not do it yet; the rate", false},
		{`{"SessionType": "QUIC_CID"}`, NotYet, "SessionType: this version does not do it yet", false},
		{`{"Protocol": "QUIC"}`, Invalid, "Protocol: \"QUIC\" is not one of HTTP, HTTPS, TCP, TCP_SSL, UDP", true},
		{`{"Protocol": "TCP_SSL"}`, Invalid, "needs a certificate", true},
		{`{"ProxyProtocol": "yes"}`, Invalid, "ProxyProtocol: \"yes\" is a JSON string, want a boolean", true},
		{`{"Certificate": {"SSLMode": "UNIDIRECTIONAL", "CertId": "VfqO4zkB"}}`, Invalid, "Certificate.CertId: without TLS Secrets", true},
		{`{"MultiCertInfo": {"CertList": [{"CertId": "a"}]}}`, Invalid, "MultiCertInfo.CertList: without TLS Secrets", true},
		{`{"Certificate": {"SSLMode": "MUTUAL"}}`, Invalid, "Certificate.SSLMode: without fairlead.dev/lb-client-ca", true},
	} {
		r := listenersOf(t, c.json)
		i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.State == c.state && strings.Contains(f.Text, c.says) })
		if i < 0 || !c.state.IsWarning() || r.Findings[i].Annotation != tencentListeners || len(r.Findings[i].Text) > 2000 {
			t.Errorf("%.60s: %+v, want %s %q", c.json, r.Findings, c.state, c.says)
		}
		if closed := r.Way == Proxied && r.Invalid(); closed != c.closed {
			t.Errorf("%.60s: closed %v (%s), want %v", c.json, closed, r.Way, c.closed)
		}
	}
	r := listenersOf(t, `{"Certificate": {"SSLMode": "MUTUAL", "CertId": "a"}, "Protocol": "HTTPS"}`, LBTLSSecrets, "shop",
		lbPrefix+"client-ca", "secret/ca")
	if r.Invalid() || r.Spec.Listeners[0].Protocol != HTTPS {
		t.Errorf("with our own: %+v", r.Findings)
	}
}

// One wrong parameter leaves the others their effect, and thousands of unknown ones give few findings.
func TestListenerParametersAreReadOneByOne(t *testing.T) {
	r := listenersOf(t, `{"HealthCheck": {"TimeOut": 1, "HealthNum": 7}}`)
	if !r.Invalid() || r.Spec.Health.Healthy != 7 {
		t.Errorf("%+v", r.Findings)
	}
	var many []string
	for i := range 5000 {
		many = append(many, fmt.Sprintf(`"Unknown%d": {}`, i))
	}
	if r := listenersOf(t, "{"+strings.Join(many, ",")+"}"); len(r.Findings) > 20 || r.Findings[0].State != Unknown {
		t.Errorf("%d findings", len(r.Findings))
	}
	if r := Read(web(tencentConfig, "shop")); len(r.Findings) != 1 || r.Findings[0].State != NotYet {
		t.Errorf("%+v", r.Findings)
	}
}

// What a JSON says does not depend on the order in which its names are read.
func TestListenerParametersAreReadInOrder(t *testing.T) {
	ours := []string{lbPrefix + "client-ca", "secret/ca", LBTLSSecrets, "shop", lbPrefix + lbProtocol, "https"}
	for range 50 {
		r := listenersOf(t, `{"Certificate": {"SSLMode": "MUTUAL"}, "Certificate.SSLMode": "UNIDIRECTIONAL"}`)
		if !strings.Contains(fmt.Sprint(r.Findings), "without "+lbPrefix+"client-ca") || r.Way != Proxied || !r.Invalid() {
			t.Fatalf("%s %+v", r.Way, r.Findings)
		}
		r = listenersOf(t, `{"Certificate.SSLMode": "UNIDIRECTIONAL", "Certificate": {"SSLMode": "MUTUAL"}}`, ours...)
		if !strings.Contains(r.Wrong(), "Certificate.SSLMode is no parameter of listeners") {
			t.Fatalf("%+v", r.Findings)
		}
		if r = listenersOf(t, `{"HealthCheck": 1, "Certificate": 2}`); !strings.Contains(r.Wrong(), `Certificate: "2" is not`) {
			t.Fatalf("%+v", r.Findings)
		}
	}
	many := map[string]string{}
	for i := range 100 {
		many[fmt.Sprintf("A%d", i)] = "x"
	}
	text, err := json.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	r := listenersOf(t, strings.TrimSuffix(string(text), "}")+`, "MultiCertInfo.SSLMode": "MUTUAL"}`)
	if r.Way != Proxied || !r.Invalid() {
		t.Errorf("the last of many unknown names: %s %+v", r.Way, r.Findings)
	}
	for _, nothing := range []string{"null", `""`, "[ ]", "{}"} {
		if r := listenersOf(t, `{"Certificate.CertId": `+nothing+`}`); r.Invalid() || !slices.Contains(states(r)[tencentListeners], Unknown) {
			t.Errorf("%s: %+v", nothing, r.Findings)
		}
	}
}

// Names match in any case, and what is empty is the default.
func TestListenerParametersInAnyCase(t *testing.T) {
	r := listenersOf(t, `{"scheduler": "LEAST_CONN", "HEALTHCHECK": {"timeOut": 3}}`)
	if s := r.Spec; r.Invalid() || s.Balance != LeastConnections || s.Health.Timeout != Duration(3*time.Second) {
		t.Errorf("%+v", r.Findings)
	}
	r = listenersOf(t, `{"Certificate": {"CertCaId": "", "CertList": []}, "MultiCertInfo": {"CertList": { }}, "EndPort": []}`)
	if r.Way != Direct || r.Invalid() || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Text[len(f.Text)-7:] != "default" }) {
		t.Errorf("%s %+v", r.Way, r.Findings)
	}
	if r := listenersOf(t, `{"Certificate": {"CertList": [{}]}}`); r.Way != Proxied || !r.Invalid() {
		t.Errorf("%s %+v", r.Way, r.Findings)
	}
	if r := listenersOf(t, `{"ProxyProtocol": []}`); r.Way != Proxied || !r.Invalid() {
		t.Errorf("%s %+v", r.Way, r.Findings)
	}
}

// Who asks for certificates of clients is not served where clients come in without one.
func TestListenerParametersNeedCertificates(t *testing.T) {
	for auth, closed := range map[string]bool{"": false, "require": false, "optional": true} {
		r := listenersOf(t, `{"Certificate": {"SSLMode": "MUTUAL"}, "Protocol": "HTTPS"}`, LBTLSSecrets, "shop", lbPrefix+"client-ca",
			"secret/ca", lbPrefix+"client-auth", auth)
		if r.Way != Proxied || r.Invalid() != closed || closed && !strings.Contains(r.Wrong(), lbPrefix+"client-auth") {
			t.Errorf("%s: %s %+v", auth, r.Way, r.Findings)
		}
	}
}

// Without CheckType, checks are of HTTP where Tencent's are, or where a parameter is about requests.
func TestListenerParametersImplyChecks(t *testing.T) {
	const tls = LBTLSSecrets
	for _, c := range []struct {
		json  string
		more  []string
		want  Protocol
		codes string
		warns bool
	}{
		{`{"Protocol": "HTTP"}`, nil, HTTP, "100-599", false},
		{`{"Protocol": "HTTPS"}`, []string{tls, "shop"}, HTTP, "100-599", false},
		{`{"Protocol": "HTTPS"}`, []string{tls, "shop", lbPrefix + "backend-protocol", "https"}, HTTPS, "100-599", false},
		{`{"Protocol": "HTTP"}`, []string{lbPrefix + "backend-protocol", "h2c"}, TCP, "", false},
		{`{"Protocol": "HTTP"}`, []string{lbPrefix + "health-codes", "200"}, HTTP, "200", false},
		{`{"Protocol": "HTTP", "HealthCheck": {"HttpCheckPath": "/up"}}`, nil, HTTP, "", false},
		{`{"Protocol": "HTTP", "HealthCheck": {"CheckType": "TCP"}}`, nil, TCP, "", false},
		{`{"Protocol": "HTTP", "HealthCheck": {"CheckType": "TCP", "HttpCode": 2}}`, nil, TCP, "http_2xx", true},
		{`{"Protocol": "HTTP", "HealthCheck": {"CheckType": "TCP", "HttpCheckDomain": "a.example"}}`, nil, TCP, "", true},
		{`{"Protocol": "HTTP", "HealthCheck": {"CheckType": "TCP", "HttpCheckMethod": "HEAD"}}`, nil, TCP, "", true},
		{`{"Protocol": "HTTP", "HealthCheck": {"CheckType": "TCP", "HttpCheckPath": "/", "HealthSwitch": 0}}`, nil, TCP, "", false},
		{`{"Protocol": "HTTP", "HealthCheck": {"HttpCheckPath": "/up"}}`, []string{lbPrefix + "health-protocol", "tcp"}, TCP, "", true},
		{`{"Protocol": "HTTP", "HealthCheck": {"HttpCheckPath": "/up"}}`, []string{lbPrefix + "health-protocol", "grpc"}, GRPC, "", false},
		{`{"Protocol": "HTTP"}`, []string{lbPrefix + lbProtocol, "tcp"}, TCP, "", true}, // ours comes first
		{`{"MaxConn": 5, "HealthCheck": {"HttpCheckPath": "/up"}}`, nil, HTTP, "", false},
		{`{"MaxConn": 5, "HealthCheck": {"HttpVersion": "HTTP/1.1", "CheckType": ""}}`, nil, HTTP, "", false},
		{`{"MaxConn": 5, "HealthCheck": {"HttpCheckPath": "", "HttpVersion": [], "HttpCode": null}}`, nil, TCP, "", false},
		{`{"MaxConn": 5, "HealthCheck": {"CheckPort": 81}}`, nil, TCP, "", false},
	} {
		r := listenersOf(t, c.json, c.more...)
		warns := slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.State.IsWarning() })
		if h := r.Spec.Health; h.Protocol != c.want || h.Codes != c.codes || warns != c.warns || r.Way != Proxied && c.want != TCP ||
			r.Invalid() {
			t.Errorf("%s %q: %s %+v %+v", c.json, c.more, r.Way, h, r.Findings)
		}
		if o := r.Origins[FieldHealthProtocol]; (o.From == tencentListeners) != (c.want.IsHTTP()) {
			t.Errorf("%s: %+v", c.json, o)
		}
	}
}

// Thousands of names that are nearly right make few findings.
func TestListenerParametersAreReportedInPart(t *testing.T) {
	var text []string
	for i := range 1000 {
		text = append(text, fmt.Sprintf(`"Certificate.SSLMode%c%c": "MUTUAL"`, 'a'+i%26, 'a'+i/26))
	}
	if r := listenersOf(t, "{"+strings.Join(text, ", ")+"}"); len(r.Findings) > 20 || !r.Invalid() {
		t.Errorf("%d findings, invalid %t", len(r.Findings), r.Invalid())
	}
}
