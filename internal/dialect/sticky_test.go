package dialect

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

const ali = beta + "alibaba-cloud-loadbalancer-"

// Every dialect that knows cookies says which, and where they can be.
func TestStickyCookies(t *testing.T) {
	const target = awsPrefix + "target-group-attributes"
	minute := Duration(time.Minute)
	for _, c := range []struct {
		pairs []string
		want  Sticky
		way   Way
	}{
		{[]string{lbPrefix + "protocol", "http", lbPrefix + "sticky-cookie", "true"}, Sticky{Cookie: true}, Proxied},
		{[]string{lbPrefix + "protocol", "http", lbPrefix + "sticky-app-cookie", "SESSION"}, Sticky{true, "SESSION", 0}, Proxied},
		{[]string{lbPrefix + "sticky-cookie", "true"}, Sticky{}, Direct},
		{[]string{ali + "protocol-port", "http:80", ali + "sticky-session", "on", ali + "sticky-session-type", "insert",
			ali + "cookie-timeout", "60"},
			Sticky{true, "", minute}, Proxied},
		{[]string{ali + "protocol-port", "http:80", ali + "sticky-session", "on", ali + "sticky-session-type", "server", ali + "cookie", "SID"},
			Sticky{true, "SID", 0}, Proxied},
		{[]string{ali + "protocol-port", "http:80", ali + "sticky-session", "off", ali + "cookie", "SID"}, Sticky{}, Proxied},
		{[]string{awsPrefix + "backend-protocol", "http", target,
			"stickiness.enabled=true,stickiness.type=lb_cookie,stickiness.lb_cookie.duration_seconds=60"}, Sticky{true, "", minute}, Proxied},
		{[]string{awsPrefix + "backend-protocol", "http", target,
			"stickiness.enabled=true,stickiness.type=app_cookie,stickiness.app_cookie.cookie_name=SID"},
			Sticky{true, "SID", Duration(24 * time.Hour)}, Proxied},
		{[]string{awsPrefix + "backend-protocol", "http", target, "stickiness.enabled=false,stickiness.type=lb_cookie"}, Sticky{}, Proxied},
	} {
		r := Read(web(c.pairs...))
		if r.Spec.Sticky != c.want || r.Way != c.way || r.Invalid() {
			t.Errorf("%q: %+v, %s, want %+v: %+v", c.pairs, r.Spec.Sticky, r.Way, c.want, r.Findings)
		}
	}
	for _, pairs := range [][]string{
		{lbPrefix + "sticky-app-cookie", "a b"}, {ali + "sticky-session-type", "both"},
		{ali + "protocol-port", "http:80", ali + "sticky-session", "on", ali + "sticky-session-type", "server"},
		{target, "stickiness.enabled=true,stickiness.type=lb_cookie,stickiness.lb_cookie.duration_seconds=604801"},
		{target, "stickiness.enabled=true,stickiness.type=app_cookie"}, {target, "stickiness.enabled=true,stickiness.type=x"},
		{target, "slow_start.duration_seconds=901"}, {target, "load_balancing.algorithm.type=best"},
	} {
		if r := Read(web(pairs...)); !r.Invalid() {
			t.Errorf("%q: %+v", pairs, r.Findings)
		}
	}
}

// What else a target group of AWS may have.
func TestAWSTargetGroup(t *testing.T) {
	r := Read(web(awsPrefix+"target-group-attributes",
		"slow_start.duration_seconds=30,load_balancing.algorithm.type=least_outstanding_requests,deregistration_delay.timeout_seconds=9"))
	s := r.Spec
	got := []any{s.SlowStart.Std(), s.Balance, s.DrainTimeout.Std(), r.Way}
	if want := []any{30 * time.Second, LeastConnections, 9 * time.Second, Proxied}; !reflect.DeepEqual(got, want) || r.Invalid() {
		t.Errorf("%v, want %v: %+v", got, want, r.Findings)
	}
	if s := Read(web(awsPrefix+"target-group-attributes", "stickiness.enabled=true,stickiness.type=source_ip")).Spec; s.Balance != SourceHash {
		t.Errorf("%+v", s)
	}
}

// TLS to Pods is verified by what the Service names; what verifies nothing is wrong.
func TestBackendTLS(t *testing.T) {
	const ca, name, cert = lbPrefix + "backend-ca", lbPrefix + "backend-server-name", lbPrefix + "backend-client-secret"
	r := Read(web(lbPrefix+"backend-protocol", "tls", ca, "ConfigMap/roots", name, "web.example.com", cert, "me"))
	if want := (BackendTLS{"configmap/roots", "web.example.com", "me"}); r.Spec.BackendTLS != want || r.Invalid() || r.Way != Proxied {
		t.Errorf("%+v: %+v", r.Spec.BackendTLS, r.Findings)
	}
	if got, want := r.Spec.Objects(), []string{"secret/me", "configmap/roots"}; !reflect.DeepEqual(got, want) {
		t.Errorf("objects %q, want %q", got, want)
	}
	for _, pairs := range [][]string{
		{ca, "secret/roots"}, {lbPrefix + "backend-protocol", "tls", name, "a.example.com"}, {lbPrefix + "backend-protocol", "tls", ca, "roots"},
		{lbPrefix + "backend-protocol", "tls", ca, "secret/a/b"}, {lbPrefix + "backend-protocol", "tls", ca, "secret/../x"},
		{lbPrefix + "backend-protocol", "tls", ca, "secret/a", name, "a b"}, {lbPrefix + "backend-protocol", "tls", cert, "a b"},
	} {
		if r := Read(web(pairs...)); !r.Invalid() || r.Way != Proxied {
			t.Errorf("%q: %s, %+v", pairs, r.Way, r.Findings)
		}
	}
}

// UDP goes the proxied way with the other ports. SCTP keeps the Service from it: with a Warning, or if that would serve something
// else than what is asked for, not at all (behaviours 105, 171, 174).
func TestMixedProtocols(t *testing.T) {
	const http, idle = lbPrefix + "protocol", lbPrefix + "idle-timeout"
	for _, c := range []struct {
		key, value, protocol string
		way                  Way
		state                State
	}{
		{http, "80=http", "UDP", Proxied, Applied},
		{http, "80=http", "SCTP", Proxied, Invalid},
		{lbPrefix + "proxy-protocol", "v2", "SCTP", Proxied, Invalid},
		{idle, "100", "UDP", Proxied, Applied},
		{idle, "100", "SCTP", Direct, NotYet},
	} {
		r := Read(Service{Annotations: map[string]string{c.key: c.value}, Ports: []Port{{"web", 80, "TCP", ""}, {"other", 80, c.protocol, ""}}})
		if r.Way != c.way || r.Invalid() != (c.state == Invalid) || !slices.Contains(states(r)[c.key], c.state) {
			t.Errorf("%s with %s: %s, %+v", c.protocol, c.key, r.Way, r.Findings)
		}
	}
}

// An appProtocol decides about Pods that have requests, unless an annotation does; bytes go on as they are.
func TestAppProtocols(t *testing.T) {
	for _, c := range []struct {
		app, protocol, backend string
		want                   Protocol
	}{
		{"kubernetes.io/h2c", "http", "", H2C}, {"kubernetes.io/ws", "http", "", HTTP}, {"kubernetes.io/wss", "http", "", HTTPS},
		{"kubernetes.io/h2c", "http", "http", HTTP}, {"kubernetes.io/h2c", "", "", TCP}, {"example.com/own", "http", "", HTTP},
	} {
		annotations := map[string]string{}
		for key, value := range map[string]string{"protocol": c.protocol, "backend-protocol": c.backend} {
			if value != "" {
				annotations[lbPrefix+key] = value
			}
		}
		r := Read(Service{Annotations: annotations, Ports: []Port{{"web", 80, "TCP", c.app}}})
		if got := r.Spec.Listeners[0].Backend; got != c.want || r.Way != map[bool]Way{true: Proxied, false: Direct}[c.protocol != ""] {
			t.Errorf("%+v: %s, %s", c, got, r.Way)
		}
	}
}

// Azure's annotations of one port count where it is the only one; AWS's are known by both beginnings.
func TestOtherKeys(t *testing.T) {
	one := Service{Ports: []Port{{"web", 80, "TCP", ""}}, Annotations: map[string]string{
		lbPrefix + "proxy-protocol":                  "v2",
		azurePortPrefix + "80_health-probe_interval": "20", azurePortPrefix + "80_health-probe_protocol": "http",
		azurePortPrefix + "80_health-probe_request-path": "/ok", azurePortPrefix + "80_health-probe_num-of-probe": "4",
		azurePortPrefix + "80_health-probe_port": "8081", azurePortPrefix + "81_health-probe_port": "1"}}
	r := Read(one)
	if h := r.Spec.Health; h.Interval != Duration(20e9) || h.Protocol != HTTP || h.Path != "/ok" || h.Unhealthy != 4 || h.Port != 8081 ||
		states(r)[azurePortPrefix+"81_health-probe_port"][0] != Meaningless {
		t.Errorf("%+v %+v", h, r.Findings)
	}
	one.Ports = append(one.Ports, Port{"other", 90, "TCP", ""})
	one.Annotations[azurePortPrefix+"90_no_lb_rule"], one.Annotations[azurePortPrefix+"x_no_lb_rule"] = "true", "true"
	one.Annotations[azurePortPrefix+"90_what"] = "true"
	r = Read(one)
	for key, want := range map[string]State{
		"80_health-probe_interval": NotYet, "90_no_lb_rule": NotYet, "x_no_lb_rule": Invalid, "90_what": Unknown,
	} {
		if got := states(r)[azurePortPrefix+key]; !slices.Equal(got, []State{want}) {
			t.Errorf("%s: %v, want %s", key, got, want)
		}
	}
	nlb := Read(web(tke+"aws-load-balancer-type", "nlb", tke+"load-balancer-source-ranges", "192.0.2.0/24"))
	if !nlb.Spec.NLB || len(nlb.Spec.SourceRanges) != 1 {
		t.Errorf("%+v", nlb.Findings)
	}
}
