package dialect

import (
	"slices"
	"strings"
	"testing"
)

// Ports for TLS without a certificate are not served in plain text: the Service takes the proxied way, in which a wrong
// configuration is not served, and nothing reports them as applied.
func TestTLSPortsWithoutCertificate(t *testing.T) {
	const ports = awsPrefix + "ssl-ports"
	for _, value := range []string{"443", "443,80", "https", "*"} {
		for _, more := range [][]string{
			nil, {awsPrefix + "ssl-cert", ""}, {awsPrefix + "backend-protocol", "http"}, {awsPrefix + "type", "nlb"},
		} {
			r := Read(web(append([]string{ports, value}, more...)...))
			if r.Way != Proxied || !r.Invalid() || !slices.Equal(states(r)[ports], []State{Invalid}) || !slices.Contains(r.Because, ports) {
				t.Errorf("%s with %q: %s, %+v", value, more, r.Way, r.Findings)
			}
			if text := r.Wrong(); !strings.Contains(text, ports) || !strings.Contains(text, LBTLSSecrets) {
				t.Errorf("%s: %s", value, text)
			}
		}
		if r := Read(web(ports, value, LBTLSSecrets, "web")); r.Invalid() || r.Way != Proxied {
			t.Errorf("%s with a certificate: %s, %+v", value, r.Way, r.Findings)
		}
	}
	if r := Read(web(ports, "")); r.Invalid() || r.Way != Direct {
		t.Errorf("empty: %s, %+v", r.Way, r.Findings)
	}
}

// A reference with a namespace is not taken for the Secret of that name in the Service's own.
func TestReferencesOfSecrets(t *testing.T) {
	const openstack = "loadbalancer.openstack.org/default-tls-container-ref"
	alibaba := beta + "alibaba-cloud-loadbalancer-cert-id"
	for _, c := range []struct{ key, value, want string }{
		{LBTLSSecrets, "web", "web"}, {LBTLSSecrets, "kube-system/web", ""}, {LBTLSSecrets, "a,kube-system/web", ""}, {LBTLSSecrets, "a:web", ""},
		{LBTLSSecrets, "arn:aws:acm:us-east-1:123456789012:certificate/web", ""}, {LBTLSSecrets, "secret/web", ""},
		{awsPrefix + "ssl-cert", "web", "web"}, {awsPrefix + "ssl-cert", "kube-system/web", ""},
		{awsPrefix + "ssl-cert", "arn:aws-cn:iam::123456789012:server-certificate/cloudfront/Web", "web"},
		{awsPrefix + "ssl-cert", "arn:aws:acm:a:1:certificate/a-1,arn:aws:acm:a:1:certificate/b-1", "a-1 b-1"},
		{openstack, "web", "web"}, {openstack, "kube-system/web", ""}, {openstack, "https://barbican.example/v1/containers/web", "web"},
		{alibaba, "web", "web"}, {alibaba, "kube-system/web", ""},
		{lbPrefix + "backend-client-secret", "kube-system/web", ""}, {lbPrefix + "backend-client-secret", "a:web", ""},
		{lbPrefix + "backend-ca", "secret/kube-system/ca", ""}, {lbPrefix + "backend-ca", "secret/kube-system:ca", ""},
		{lbPrefix + "access-log-credentials", "kube-system/s3", ""},
	} {
		r := Read(web(c.key, c.value, lbPrefix+"backend-protocol", "https"))
		wrong := slices.Contains(states(r)[c.key], Invalid)
		if got := strings.Join(r.Spec.Certificates, " "); got != c.want || wrong != (c.want == "") {
			t.Errorf("%s: %q: %q, %+v", c.key, c.value, got, r.Findings)
		}
		if c.want == "" && (len(r.Spec.TLSSecrets()) > 0 || r.Spec.BackendTLS.Authority != "") {
			t.Errorf("%s: %q names %q", c.key, c.value, r.Spec.Objects())
		}
		if c.key == LBTLSSecrets && c.want == "" && (r.Way != Proxied || !strings.Contains(r.Wrong(), "own namespace")) {
			t.Errorf("%q: %s, %s", c.value, r.Way, r.Wrong())
		}
	}
}
