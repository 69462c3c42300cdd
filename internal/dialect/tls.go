package dialect

import (
	"crypto/tls"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// TLSPolicy is what a TLS listener agrees to.
type TLSPolicy struct {
	// Least and Most are versions of package tls.
	Least, Most uint16
	// Suites are the suites of TLS 1.2 and before, nil for the library's own choice; the suites of TLS 1.3
	// cannot be chosen.
	Suites []uint16
}

// Suites of TLS 1.2 and before. What a policy has beside these (DHE, CCM) no library of
// this program can do.
var (
	suitesGCM = []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	}
	suitesForward = append(suitesGCM[:len(suitesGCM):len(suitesGCM)],
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA)
	suitesAll = append(suitesForward[:len(suitesForward):len(suitesForward)],
		tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256,
		tls.TLS_RSA_WITH_AES_128_CBC_SHA, tls.TLS_RSA_WITH_AES_256_CBC_SHA)
	// suitesAEAD12 are the suites of the strict policy without CBC and SHA-1.
	suitesSHA2 = append(suitesGCM[:len(suitesGCM):len(suitesGCM)],
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256)
)

// tlsPolicies are the policies of AWS
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/describe-ssl-policies.html
// and https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/elb-security-policy-table.html),
// of Alibaba (https://www.alibabacloud.com/help/en/slb/classic-load-balancer/user-guide/tls-security-policies), and
// least versions.
var tlsPolicies = makeTLSPolicies()

func makeTLSPolicies() map[string]TLSPolicy {
	const v10, v11, v12, v13 = tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12, tls.VersionTLS13
	p := map[string]TLSPolicy{
		"1.0": {v10, v13, nil}, "1.1": {v11, v13, nil}, "1.2": {v12, v13, nil}, "1.3": {v13, v13, nil},
		"tls_cipher_policy_1_0": {v10, v12, suitesAll}, "tls_cipher_policy_1_1": {v11, v12, suitesAll},
		"tls_cipher_policy_1_2": {v12, v12, suitesAll}, "tls_cipher_policy_1_2_strict": {v12, v12, suitesForward},
		"tls_cipher_policy_1_2_strict_with_1_3": {v12, v13, suitesForward},
	}
	maps.Copy(p, map[string]TLSPolicy{ // of AWS, after the common beginning
		awsPolicy + "2011-08": {v10, v12, suitesAll}, awsPolicy + "2014-01": {v10, v12, suitesAll}, awsPolicy + "2014-10": {v10, v12, suitesAll},
		awsPolicy + "2015-02": {v10, v12, suitesAll}, awsPolicy + "2015-03": {v10, v12, suitesAll}, awsPolicy + "2015-05": {v10, v12, suitesAll},
		awsPolicy + "2016-08": {v10, v12, suitesAll}, awsPolicy + "TLS-1-0-2015-04": {v10, v12, suitesAll},
		awsPolicy + "TLS-1-1-2017-01": {v11, v12, suitesAll}, awsPolicy + "TLS-1-2-2017-01": {v12, v12,
			append(suitesSHA2[:len(suitesSHA2):len(suitesSHA2)],
				tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256)},
		awsPolicy + "TLS-1-2-Ext-2018-06": {v12, v12, suitesAll}, awsPolicy + "FS-2018-06": {v10, v12, suitesForward},
		awsPolicy + "FS-1-1-2019-08": {v11, v12, suitesForward}, awsPolicy + "FS-1-2-2019-08": {v12, v12, suitesForward},
		awsPolicy + "FS-1-2-Res-2019-08": {v12, v12, suitesSHA2}, awsPolicy + "FS-1-2-Res-2020-10": {v12, v12, suitesGCM},
		awsPolicy + "TLS13-1-0-2021-06": {v10, v13, suitesAll}, awsPolicy + "TLS13-1-1-2021-06": {v11, v13, suitesAll},
		awsPolicy + "TLS13-1-2-2021-06": {v12, v13, suitesSHA2}, awsPolicy + "TLS13-1-2-Res-2021-06": {v12, v13, suitesGCM},
		awsPolicy + "TLS13-1-2-Ext1-2021-06": {v12, v13, append(suitesSHA2[:len(suitesSHA2):len(suitesSHA2)],
			tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256)},
		awsPolicy + "TLS13-1-2-Ext2-2021-06": {v12, v13, suitesAll}, awsPolicy + "TLS13-1-3-2021-06": {v13, v13, nil},
	})
	return p
}

// awsPolicy begins the names of AWS's policies.
const awsPolicy = "ELBSecurityPolicy-"

// TLSPolicyOf returns a policy by its name, the default one for "".
func TLSPolicyOf(name string) (TLSPolicy, bool) {
	if name == "" {
		return TLSPolicy{tls.VersionTLS12, tls.VersionTLS13, nil}, true
	}
	p, ok := tlsPolicies[name]
	return p, ok
}

// readBackendCA reads by what certificates of Pods are verified.
func readBackendCA(r *reader, v string) error {
	object, err := readAuthority(v)
	if err != nil {
		return err
	}
	r.set(FieldBackendCA, object, func(s *Spec) { s.BackendTLS.Authority = object })
	return nil
}

// readAuthority reads the name of an object with certificates.
func readAuthority(v string) (string, error) {
	kind, name, _ := strings.Cut(v, "/")
	if kind = strings.ToLower(kind); kind != "secret" && kind != "configmap" || strings.Contains(name, "/") {
		return "", fmt.Errorf("%q is neither secret/NAME nor configmap/NAME", shorten(v))
	}
	name, err := secretName(name)
	return kind + "/" + name, err
}

// readServerName reads the name that certificates of Pods are for.
func readServerName(r *reader, v string) error {
	other := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.:", c)
	}
	if len(v) > 253 || strings.ContainsFunc(v, other) {
		return fmt.Errorf("%q is no name of a host", shorten(v))
	}
	r.set(FieldBackendName, v, func(s *Spec) { s.BackendTLS.ServerName = v })
	return nil
}

// readClientSecret reads which certificate the load balancer shows to Pods.
func readClientSecret(r *reader, v string) error {
	name, err := secretName(v)
	if err != nil {
		return err
	}
	r.set(FieldBackendCert, name, func(s *Spec) { s.BackendTLS.Certificate = name })
	return nil
}

// finishBackendTLS rejects what would verify nothing.
func (r *reader) finishBackendTLS() {
	for _, f := range []Field{FieldBackendCA, FieldBackendName, FieldBackendCert} {
		o, has := r.Origins[f]
		if has && !slices.ContainsFunc(r.Spec.Listeners, func(l Listener) bool { return l.Backend.IsTLS() }) {
			r.found(Invalid, o.From, o.Value, fmt.Sprintf("annotation %s: there is no TLS to Pods: no port has the backend protocol tls or https",
				o.From))
		}
	}
	ca, hasCA := r.Origins[FieldBackendCA]
	if o, has := r.Origins[FieldBackendName]; has && !hasCA {
		r.found(Invalid, o.From, o.Value, fmt.Sprintf("annotation %s: nothing verifies the name without %sbackend-ca", o.From, lbPrefix))
	} else if !has && hasCA {
		r.Origins[FieldBackendName] = Origin{"default, with " + ca.From, "SERVICE.NAMESPACE.svc"}
	}
}

// LBACMEHosts names the hosts of a certificate that is ordered by ACME.
const LBACMEHosts = lbPrefix + "acme-hosts"

// maxACMEHosts bounds the names of a certificate.
const maxACMEHosts = 20

// acmeHosts returns the annotation with the names that a certificate is ordered for.
func acmeHosts() Annotation {
	return Annotation{Key: LBACMEHosts, Sets: []Field{FieldACMEHosts},
		Values: "host names with commas between, for which a certificate is ordered by ACME (RFC 8555) and kept in the first Secret of " +
			LBTLSSecrets,
		read: func(r *reader, v string) error {
			var hosts []string
			for item := range strings.SplitSeq(v, ",") {
				host := strings.ToLower(strings.TrimSpace(item))
				if !isHostName(strings.TrimPrefix(host, "*.")) {
					return fmt.Errorf("%q is not a host name with a domain", shorten(item))
				}
				hosts = append(hosts, host)
			}
			slices.Sort(hosts)
			if hosts = slices.Compact(hosts); len(hosts) > maxACMEHosts {
				return fmt.Errorf("%d host names; want %d at most", len(hosts), maxACMEHosts)
			}
			r.set(FieldACMEHosts, strings.Join(hosts, ","), func(s *Spec) { s.ACMEHosts = hosts })
			return nil
		}}
}

// isHostName reports whether s, in lower case, is a name of a host of which a certificate can be.
func isHostName(s string) bool {
	labels := strings.Split(s, ".")
	for _, l := range labels {
		other := func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' }
		if l == "" || len(l) > 63 || strings.ContainsFunc(l, other) || strings.Trim(l, "-") != l {
			return false
		}
	}
	digits := strings.Trim(labels[len(labels)-1], "0123456789") == "" // an address
	return len(labels) > 1 && len(s) <= 253 && !digits
}

// LBACMEChallenge is how an authority of ACME verifies the hosts.
const LBACMEChallenge = lbPrefix + "acme-challenge"

// The challenges of ACME (RFC 8737; RFC 8555, 8.3 and 8.4).
const (
	TLSALPN01 = "tls-alpn-01"
	HTTP01    = "http-01"
	DNS01     = "dns-01"
)

// acmeChallenge returns the annotation that chooses the challenge.
func acmeChallenge() Annotation {
	return word(LBACMEChallenge, map[string]string{TLSALPN01: "", HTTP01: HTTP01, DNS01: DNS01}, FieldACMEChallenge, "",
		func(s *Spec, v string) { s.ACMEChallenge = v })
}

// checkACME reports host names of a Service that has no Secret for their certificate, no listener that uses it, or no port at
// which the authority can look.
func (r *reader) checkACME() {
	o := r.Origins[FieldACMEHosts]
	if len(r.Spec.ACMEHosts) == 0 {
		if o := r.Origins[FieldACMEChallenge]; r.Spec.ACMEChallenge != "" {
			r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("%s needs %s", LBACMEChallenge, LBACMEHosts))
		}
		return
	}
	wrong := func(format string, args ...any) {
		r.found(Invalid, o.From, shorten(o.Value), LBACMEHosts+" "+fmt.Sprintf(format, args...))
	}
	if len(r.Spec.Certificates) == 0 {
		wrong("needs %s: the first Secret gets the certificate", LBTLSSecrets)
	}
	has := func(port uint16, is func(Protocol) bool) bool {
		return slices.ContainsFunc(r.Spec.Listeners, func(l Listener) bool { return (port == 0 || l.Port == port) && is(l.Protocol) })
	}
	isAny := func(Protocol) bool { return true }
	switch r.Spec.ACMEChallenge {
	case HTTP01:
		if has(80, isAny) && !has(80, func(p Protocol) bool { return p == HTTP }) {
			wrong("needs port 80 with HTTP, or none, where the authority looks (HTTP-01)")
		} else if r.Spec.NLB && !has(80, isAny) {
			wrong("needs port 80 with HTTP: a Network Load Balancer lets nothing through at other ports than its own (HTTP-01)")
		}
	case "":
		if !has(443, Protocol.IsTLS) {
			wrong("needs port 443 with TLS or HTTPS, where the authority looks (TLS-ALPN-01)")
		}
	}
	if !has(0, Protocol.IsTLS) {
		wrong("needs a port with TLS or HTTPS")
	}
	for _, host := range r.Spec.ACMEHosts {
		if strings.HasPrefix(host, "*.") && r.Spec.ACMEChallenge != DNS01 {
			wrong("has %s: an authority verifies names with * by %s: %s only", host, LBACMEChallenge, DNS01)
		}
	}
}

// ACME is the annotation of a Gateway, a ListenerSet or an Ingress that has the certificates of its hosts ordered. Its value is the
// challenge.
const ACME = "fairlead.dev/acme"

// ReadACME returns the challenge that a value of ACME names.
func ReadACME(value string) (challenge string, err error) {
	all := []string{DNS01, HTTP01, TLSALPN01}
	if c := strings.ToLower(strings.TrimSpace(value)); slices.Contains(all, c) {
		return c, nil
	}
	return "", fmt.Errorf("%.100q: want one of %s", value, strings.Join(all, ", "))
}

// UnfitForACME returns why no certificate for a host, in lower case, can be ordered by a challenge, "" if one can.
func UnfitForACME(host, challenge string) string {
	base, wild := strings.CutPrefix(host, "*.")
	switch {
	case host == "":
		return "no host is named that the certificate is for"
	case !isHostName(base):
		return fmt.Sprintf("%.100q is not a host name with a domain", host)
	case wild && challenge != DNS01:
		return fmt.Sprintf("an authority verifies %s only by %s", host, DNS01)
	}
	return ""
}
