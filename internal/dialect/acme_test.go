package dialect

import (
	"strings"
	"testing"
)

// A challenge needs a port where the authority can look, and a name with * the one that looks at no port.
func TestACMEChallenges(t *testing.T) {
	http, https := Port{Name: "http", Number: 80, Protocol: "TCP"}, Port{Name: "tls", Number: 443, Protocol: "TCP"}
	other := Port{Name: "tls", Number: 8443, Protocol: "TCP"}
	for _, c := range []struct {
		hosts, challenge, protocols string
		ports                       []Port
		wrong                       string
	}{
		{"a.example.com", "", "https", []Port{https}, ""},
		{"a.example.com", "tls-alpn-01", "https", []Port{other}, "needs port 443"},
		{"*.example.com", "", "https", []Port{https}, "has *.example.com: an authority verifies names with * by"},
		{"a.example.com", "http-01", "80=http,443=https", []Port{http, https}, ""},
		{"a.example.com", "http-01", "tls", []Port{other}, ""},
		{"a.example.com", "http-01", "80=tcp,443=https", []Port{http, https}, "needs port 80 with HTTP, or none"},
		{"a.example.com", "http-01", "http", []Port{http}, "needs a port with TLS or HTTPS"},
		{"*.example.com", "http-01", "https", []Port{https}, "dns-01 only"},
		{"*.example.com,example.com", "dns-01", "tls", []Port{other}, ""},
	} {
		annotations := map[string]string{LBACMEHosts: c.hosts, LBTLSSecrets: "cert", LBProtocol: c.protocols}
		if c.challenge != "" {
			annotations[LBACMEChallenge] = c.challenge
		}
		r := Read(Service{Annotations: annotations, Ports: c.ports})
		if got := r.Wrong(); got == "" != (c.wrong == "") || !strings.Contains(got, c.wrong) {
			t.Errorf("%+v: %q", c, got)
		}
	}
}
