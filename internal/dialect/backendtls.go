package dialect

import (
	"fmt"
	"slices"
	"strings"
)

// readBackendCA reads by what certificates of Pods are verified.
func readBackendCA(r *reader, v string) error {
	kind, name, _ := strings.Cut(v, "/")
	if kind = strings.ToLower(kind); kind != "secret" && kind != "configmap" || strings.Contains(name, "/") {
		return fmt.Errorf("%q is neither secret/NAME nor configmap/NAME", shorten(v))
	}
	name, err := secretName(name)
	if err != nil {
		return err
	}
	r.set(FieldBackendCA, kind+"/"+name, func(s *Spec) { s.BackendTLS.Authority = kind + "/" + name })
	return nil
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
