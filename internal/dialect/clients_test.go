package dialect

import (
	"slices"
	"strings"
	"testing"
)

// Annotations as in the usage document of Alibaba's controller
// (https://github.com/kubernetes/cloud-provider-alibaba-cloud/blob/master/docs/usage.md), by the numbers of its examples, and some
// more are applied. What fairlead does not do is a Warning; what restricts clients by means that fairlead has not is served only if
// the Service restricts them by others.
func TestExamplesOfAlibaba(t *testing.T) {
	for _, prefix := range []string{beta + "alibaba-cloud-loadbalancer-", beta + "alicloud-loadbalancer-"} {
		for name, c := range map[string]struct {
			pairs []string
			warns string           // keys with a Warning
			check func(*Spec) bool // nil if the Service is not served
		}{
			"15": {[]string{"address-type", "intranet", "network-type", "vpc"}, "", func(s *Spec) bool { return s.Internal }},
			"17 a": {[]string{"health-check-type", "tcp", "health-check-connect-timeout", "8", "healthy-threshold", "4",
				"unhealthy-threshold", "4", "health-check-interval", "3"}, "",
				func(s *Spec) bool {
					return s.Health.Timeout == 8e9 && s.Health.Interval == 3e9 && s.Health.Healthy == 4
				}},
			"17 b": {[]string{"health-check-flag", "on", "health-check-type", "http", "health-check-uri", "/test/index.html",
				"healthy-threshold", "4", "unhealthy-threshold", "4", "health-check-timeout", "10", "health-check-interval", "3",
				"protocol-port", "http:80"}, "",
				func(s *Spec) bool { return s.Health.Timeout == 10e9 && s.Health.Path == "/test/index.html" }},
			"19": {[]string{"acl-status", "on", "acl-id", "acl-x", "acl-type", "white"}, "acl-id acl-status acl-type", nil},
			"21": {[]string{"protocol-port", "https:443,http:80", "cert-id", "web", "forward-port", "80:443"}, "",
				func(s *Spec) bool { return s.Listeners[0].Redirect == 443 && s.Listeners[1].Redirect == 0 }},

			"HTTP health checks": {[]string{"protocol-port", "http:80", "health-check-flag", "on", "health-check-type", "http",
				"health-check-uri", "/test/index.html", "healthy-threshold", "4", "unhealthy-threshold", "4", "health-check-timeout", "10",
				"health-check-interval", "3", "health-check-domain", "www.example.com", "health-check-method", "head"}, "",
				func(s *Spec) bool {
					return s.Health.Timeout == 10e9 && s.Health.Host == "www.example.com" && s.Health.Method == "HEAD" &&
						s.Health.Path == "/test/index.html"
				}},
			"HTTPS": {[]string{"protocol-port", "https:443", "cert-id", "123456_cn-hangzhou"}, "",
				func(s *Spec) bool {
					return slices.Equal(s.Certificates, []string{"123456-cn-hangzhou"}) && s.Listeners[1].Protocol == HTTPS
				}},
			"no access control list": {[]string{"acl-status", "off", "acl-id", "acl-x", "acl-type", "white"}, "",
				func(*Spec) bool { return true }},
			"time-outs": {[]string{"protocol-port", "http:80", "idle-timeout", "30", "request-timeout", "60"}, "",
				func(s *Spec) bool { return s.IdleTimeout == 30e9 && s.RequestTimeout == 60e9 }},
			"no time-out of requests": {[]string{"protocol-port", "http:80", "idle-timeout", "30"}, "",
				func(s *Spec) bool { return s.RequestTimeout == 30e9 }},
			"no time-outs": {[]string{"protocol-port", "http:80"}, "",
				func(s *Spec) bool { return s.IdleTimeout == 3600e9 && s.RequestTimeout == 60e9 }},
			"host name":                {[]string{"hostname", "www.example.com"}, "", func(*Spec) bool { return true }},
			"client certificates":      {[]string{"cacert-id", "1_2"}, "cacert-id", nil},
			"client certificates, too": {[]string{"protocol-port", "http:80,https:443", "cert-id", "web", "cacert", "on"}, "cacert", nil},
			"checks of the address": {[]string{"protocol-port", "http:80", "health-check-type", "http", "health-check-domain", "$_ip"}, "",
				func(s *Spec) bool { return s.Health.Host == "" }},
		} {
			var pairs []string
			for i := 0; i < len(c.pairs); i += 2 {
				pairs = append(pairs, prefix+c.pairs[i], c.pairs[i+1])
			}
			r := Read(web(pairs...))
			var warns []string
			for _, f := range r.Findings {
				if f.State.IsWarning() {
					warns = append(warns, strings.TrimPrefix(f.Annotation, prefix))
				}
			}
			slices.Sort(warns)
			got := strings.Join(slices.Compact(warns), " ")
			if got != c.warns || r.Invalid() != (c.check == nil) || c.check != nil && !c.check(&r.Spec) || c.check == nil && r.Way != Proxied {
				t.Errorf("%s: Warnings %q, want %q; %s, %+v", name, got, c.warns, r.Way, r.Findings)
			}
		}
		restricted := web(prefix+"acl-status", "on", prefix+"acl-id", "acl-x", prefix+"protocol-port", "https:443,https:80", prefix+"cert-id",
			"web", prefix+"cacert-id", "1_2", lbPrefix+"client-ca", "secret/ca")
		restricted.SourceRanges = []string{"192.0.2.0/24"}
		if r := Read(restricted); slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.State.IsWarning() }) {
			t.Errorf("restricted by the Service: %+v", r.Findings)
		}
		mixed := web(prefix+"acl-status", "on")
		mixed.Ports = append(mixed.Ports, Port{"s", 90, "SCTP", ""})
		if r := Read(mixed); !r.Invalid() || r.Way != Proxied {
			t.Errorf("with a port of SCTP it takes the way %s: %+v", r.Way, r.Findings)
		}
	}
}

// The rule about time-outs of AWS stays for others than Alibaba.
func TestTimeoutBelowInterval(t *testing.T) {
	for _, prefix := range []string{lbPrefix + "health-", awsPrefix + "healthcheck-"} {
		if r := Read(web(prefix+"timeout", "8", prefix+"interval", "5")); !r.Invalid() {
			t.Errorf("%s: %+v", prefix, r.Findings)
		}
	}
}

// What a redirect needs must be there, else nothing is served: it would be http in place of https.
func TestRedirects(t *testing.T) {
	const key = lbPrefix + "redirect"
	for value, want := range map[string]uint16{"80=443": 443, "443=80": 0, "80=8443": 0, "80=80": 0, "80": 0, "80=443,80=443": 0, "x=443": 0,
		"80=443=1": 0, "80=70000": 0} {
		r := Read(web(lbPrefix+"protocol", "80=http,443=https", LBTLSSecrets, "web", key, value))
		if r.Invalid() != (want == 0) || r.Spec.Listeners[0].Redirect != want || r.Way != Proxied {
			t.Errorf("%s: %d, %+v", value, r.Spec.Listeners[0].Redirect, r.Findings)
		}
	}
	two := Read(web(lbPrefix+"protocol", "80=http,443=https", LBTLSSecrets, "web", key, "7=8,5=6,9=10,3=4")).Wrong()
	if !strings.Contains(two, "want a port 3 of") {
		t.Errorf("of several wrong ones the first is told: %s", two)
	}
	if r := Read(web(lbPrefix+"protocol", "tcp", key, "80=443")); !r.Invalid() || r.Way != Proxied {
		t.Errorf("without http: %s, %+v", r.Way, r.Findings)
	}
}

// Our own annotations about clients, requests and ejection, and what is wrong with them.
func TestClientsAndEjection(t *testing.T) {
	https := []string{lbPrefix + "protocol", "https", LBTLSSecrets, "web"}
	mixed := []string{lbPrefix + "protocol", "80=http,443=https", LBTLSSecrets, "web"}
	for _, c := range []struct {
		base       []string
		key, value string
		wrong      string // a part of the message, empty if it is right
		check      func(*Spec) bool
	}{
		{https, "client-ca", "secret/ca", "", func(s *Spec) bool {
			return s.Clients.Authority == "secret/ca" && s.Headers.ClientCertificate == "X-Client-Subject" &&
				slices.Contains(s.Objects(), "secret/ca")
		}},
		{https, "client-ca", "ca", "neither secret/NAME nor configmap/NAME", nil},
		{https, "client-ca", "secret/kube-system/ca", "neither", nil},
		{mixed, "client-ca", "secret/ca", "a port of the Service is without TLS", nil},
		{nil, "client-ca", "secret/ca", "a port of the Service is without TLS", nil},
		{https, "client-auth", "require", "nothing verifies certificates", nil},
		{https, "client-auth", "always", "not one of", nil},
		{append(slices.Clone(https), lbPrefix+"client-ca", "configmap/ca"), "client-subject-header", "x-user", "",
			func(s *Spec) bool { return s.Headers.ClientCertificate == "X-User" }},
		{append(slices.Clone(https), lbPrefix+"client-ca", "configmap/ca"), "client-subject-header", "Content-Length", "begins with X-", nil},
		{append(slices.Clone(https), lbPrefix+"client-ca", "configmap/ca"), "client-subject-header", "X-Forwarded-For", "begins with X-", nil},
		{append(slices.Clone(https), lbPrefix+"client-ca", "configmap/ca"), "client-subject-header", "X-A\r\nB", "begins with X-", nil},
		{append(slices.Clone(mixed), lbPrefix+"client-ca", "configmap/ca"), "client-auth", "optional", "",
			func(s *Spec) bool { return s.Clients.Optional }},
		{https, "client-requests", "10", "", func(s *Spec) bool { return s.Clients.Requests == 10 }},
		{nil, "client-requests", "10", "no port is of http", nil}, {https, "client-requests", "0", "not a number from 1", nil},
		{nil, "client-connections", "10", "", func(s *Spec) bool { return s.Clients.Connections == 10 }},
		{https, "underscore-headers", "keep", "", func(s *Spec) bool { return s.Headers.Underscores }},
		{https, "request-id", "x-request-id, Traceparent", "", func(s *Spec) bool { return s.Headers.RequestID && s.Headers.TraceParent }},
		{https, "compress", "gzip", "", func(s *Spec) bool { return slices.Equal(s.Compress, []string{"gzip"}) }},
		{https, "compress", "Zstd , gzip", "", func(s *Spec) bool { return slices.Equal(s.Compress, []string{"zstd", "gzip"}) }},
		{https, "compress", "br", "\"br\" is not one of zstd, gzip, once", nil}, {https, "compress", "gzip,gzip", "is not one of", nil},
		{https, "compress", "off", "", func(s *Spec) bool { return len(s.Compress) == 0 }}, {https, "compress", "true", "is not one of", nil},
		{https, "request-id", "uuid", "neither x-request-id nor traceparent", nil},
		{https, "eject", "off", "", func(s *Spec) bool { return s.Eject.Off }},
		{https, "eject", "errors=5, share=30,panic=0", "", func(s *Spec) bool { return s.Eject == Eject{Errors: 5, Share: 30} }},
		{https, "eject", "errors=0", "errors: \"0\" is not a number from 1", nil}, {https, "eject", "on", "is not off, or pairs", nil},
		{https, "eject", "errors=1,errors=2", "is not off, or pairs", nil}, {https, "eject", "rate=1", "not one of errors, share, panic", nil},
		{https, "access-log-format", "json", "", func(s *Spec) bool { return s.AccessLog.Format == LogJSON }},
	} {
		r := Read(web(append(slices.Clone(c.base), lbPrefix+c.key, c.value)...))
		if c.wrong == "" && (r.Invalid() || !c.check(&r.Spec)) || c.wrong != "" && !strings.Contains(r.Wrong(), c.wrong) {
			t.Errorf("%s %s: %+v", c.key, c.value, r.Findings)
		}
		if strings.HasPrefix(c.key, "client-") && c.wrong == "" && r.Way != Proxied {
			t.Errorf("%s takes no effect in the direct way", c.key)
		}
	}
}

// A bound of connections is none for UDP.
func TestConnectionsOfUDP(t *testing.T) {
	s := web(lbPrefix+"client-connections", "10")
	s.Ports = []Port{{"dns", 53, "UDP", ""}}
	if r := Read(s); !strings.Contains(r.Wrong(), "no port is of TCP") {
		t.Errorf("%+v", r.Findings)
	}
	s.Ports = append(s.Ports, Port{"dns-tcp", 53, "TCP", ""})
	if r := Read(s); r.Invalid() {
		t.Errorf("with a port of TCP: %+v", r.Findings)
	}
}

// A key without its domain, or with another one, is found.
func TestMisplacedAnnotations(t *testing.T) {
	for key, want := range map[string]string{
		"aws-loadbalancer-ssl-cert":                            awsPrefix + "ssl-cert",
		"aws-load-balancer-ssl-cert":                           awsPrefix + "ssl-cert",
		"kubernetes.io/alibaba-cloud-loadbalancer-cert-id":     beta + "alibaba-cloud-loadbalancer-cert-id",
		"example.com/load-balancer-of-the-finance-departement": "",
		"example.com/owner":                                    "",
	} {
		r := Read(web(key, "x"))
		got := ""
		for _, f := range r.Findings {
			if f.State == Unknown {
				got = f.Text
			}
		}
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %s", key, got, want)
		}
	}
}
