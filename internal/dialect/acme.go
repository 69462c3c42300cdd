package dialect

import (
	"fmt"
	"slices"
	"strings"
)

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
				if !isHostName(host) {
					return fmt.Errorf("%q is not a host name with a domain; there are none with *", shorten(item))
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

// checkACME reports host names of a Service that has no Secret for their certificate, or no listener that uses it.
func (r *reader) checkACME() {
	if len(r.Spec.ACMEHosts) == 0 {
		return
	}
	o := r.Origins[FieldACMEHosts]
	if len(r.Spec.Certificates) == 0 {
		r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("%s needs %s: the first Secret gets the certificate", LBACMEHosts, LBTLSSecrets))
	}
	if !slices.ContainsFunc(r.Spec.Listeners, func(l Listener) bool { return l.Protocol.IsTLS() && l.Port == 443 }) {
		r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("%s needs port 443 with TLS or HTTPS, where the authority looks (TLS-ALPN-01)",
			LBACMEHosts))
	}
}
