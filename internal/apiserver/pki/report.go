package pki

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"slices"
	"time"
)

// Report describes the certificates of a server or a node. Authorities are given by Hash.
type Report struct {
	// Trusts are the authorities by which it verifies others, Issuer is the one that signed its own
	// certificates, empty if it is none of those, and Ends when the first of those ends.
	Trusts []string  `json:"trusts"`
	Issuer string    `json:"issuer,omitempty"`
	Ends   time.Time `json:"ends"`
	// Seen are users with a certificate of an authority that does not sign, which a server has recognised
	// a moment ago.
	Seen []string `json:"seen,omitempty"`
	// SeenPartial is set until a server has looked for such users for as long as it remembers them: since its start, or
	// since another authority signs.
	SeenPartial bool `json:"seenPartial,omitempty"`
	// Peers are the authorities by which the embedded etcd of a server verifies the etcds of others, empty where it has none.
	Peers []string `json:"peers,omitempty"`
}

// ReportOf returns the report of one who verifies by the authorities in PEM text and has the certificate leaf.
func ReportOf(authorities []byte, leaf *x509.Certificate) Report {
	r := Report{Ends: leaf.NotAfter.UTC()}
	for _, c := range certs(authorities) {
		r.Trusts = append(r.Trusts, Hash(c))
		if bytes.Equal(c.SubjectKeyId, leaf.AuthorityKeyId) {
			r.Issuer = Hash(c)
		}
	}
	return r
}

// Report returns the report of one who verifies by the bundle and has the certificate leaf.
func (b *Bundle) Report(leaf *x509.Certificate) Report { return ReportOf(b.PEM(), leaf) }

// String returns the form that ParseReport reads.
func (r Report) String() string {
	text, err := json.Marshal(r)
	if err != nil {
		return "" // strings and times do not fail to marshal
	}
	return string(text)
}

// ParseReport reads a report. One that cannot be read trusts nothing.
func ParseReport(text string) Report {
	var r Report
	if json.Unmarshal([]byte(text), &r) != nil {
		return Report{}
	}
	return r
}

// PeersBehind reports whether an embedded etcd trusts an authority that its server does not trust any more.
func (r Report) PeersBehind() bool { return !r.TrustsAll(r.Peers...) }

// TrustsAll reports whether all the authorities are trusted.
func (r Report) TrustsAll(authorities ...string) bool {
	return !slices.ContainsFunc(authorities, func(a string) bool { return !slices.Contains(r.Trusts, a) })
}
