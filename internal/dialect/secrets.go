package dialect

import (
	"fmt"
	"slices"
	"strings"
)

// certificates returns an annotation with names of TLS Secrets, or names of a cloud, which begin with cloud and whose
// last component is one (behaviour 115).
func certificates(key, values string, cloud ...string) Annotation {
	return Annotation{Key: key, Values: values, Sets: []Field{FieldCertificates}, read: func(r *reader, v string) error {
		var names []string
		for item := range strings.SplitSeq(v, ",") {
			item = strings.TrimSpace(item)
			if slices.ContainsFunc(cloud, func(p string) bool { return strings.HasPrefix(strings.ToLower(item), p) }) {
				item = item[strings.LastIndexAny(item, "/:")+1:]
			}
			name, err := secretName(item)
			if err != nil {
				return err
			}
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		r.set(FieldCertificates, strings.Join(names, ","), func(s *Spec) { s.Certificates = names })
		return nil
	}}
}

// secretName returns a name of a Secret, or of another object of the Service's namespace, in lower case. One with a
// namespace is rejected: the object of the same name in the Service's own namespace would be another one.
func secretName(v string) (string, error) {
	name := strings.ToLower(v)
	if len(name) == 0 || len(name) > 253 {
		return "", fmt.Errorf("%q names no Secret", shorten(v))
	}
	if i := strings.LastIndexAny(name, "/:"); i >= 0 {
		return "", fmt.Errorf("%q is not the name of a Secret: only Secrets of the Service's own namespace count; write %q if it is there",
			shorten(v), shorten(name[i+1:]))
	}
	for i, c := range []byte(name) {
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || i == len(name)-1 || c != '-' && c != '.') {
			return "", fmt.Errorf("%q cannot be the name of a Secret: use only lower case letters, digits, dots and hyphens", shorten(name))
		}
	}
	return name, nil
}

// checkTLSPorts rejects ports for TLS without a certificate: they must not be served in plain text.
func (r *reader) checkTLSPorts() {
	by := r.raw.tlsPortsBy
	if by.From == "" || len(r.Spec.Certificates) > 0 {
		return
	}
	r.Findings = slices.DeleteFunc(r.Findings, func(f Finding) bool { return f.Annotation == by.From && f.State == Applied })
	r.found(Invalid, by.From, by.Value, fmt.Sprintf("annotation %s: there is no certificate, and ports for TLS are not served in plain text: "+
		"name a TLS Secret of the namespace by %sssl-cert or %s, or remove this annotation", by.From, awsPrefix, LBTLSSecrets))
}
