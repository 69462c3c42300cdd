package dialect

import (
	"fmt"
	"net/textproto"
	"slices"
	"strings"
)

// Clients has the conditions and limits for clients.
type Clients struct {
	// Authority is the object with the certificates that verify clients, as BackendTLS.Authority; empty if none are asked
	// for. Optional lets clients without a certificate connect, too.
	Authority string `json:"authority,omitempty"`
	Optional  bool   `json:"optional,omitempty"`
	// Requests a second, and Connections at a time, bound each client: an IPv4 address, or an IPv6 network of 64 bits; 0 for no bound.
	Requests    int `json:"requests,omitempty"`
	Connections int `json:"connections,omitempty"`
	// Body bounds the body of a request, in KiB; 0 for no bound.
	Body int `json:"body,omitempty"`
}

// Headers is what becomes of fields of requests.
type Headers struct {
	// Underscores keeps fields whose names have a "_".
	Underscores bool `json:"underscores,omitempty"`
	// RequestID and TraceParent give each request X-Request-Id and traceparent, unless the client has.
	RequestID   bool `json:"requestID,omitempty"`
	TraceParent bool `json:"traceParent,omitempty"`
	// ClientCertificate is the field with the subject of a client's certificate, if that was verified.
	ClientCertificate string `json:"clientCertificate,omitempty"`
}

// DefaultClientField is the field of Headers.ClientCertificate without an annotation.
const DefaultClientField = "X-Client-Subject"

// ourClients are our own annotations about clients and fields of requests.
func ourClients() []Annotation {
	return []Annotation{
		{Key: lbPrefix + "client-ca", Sets: []Field{FieldClientCA}, read: func(r *reader, v string) error {
			object, err := readAuthority(v)
			if err == nil {
				r.set(FieldClientCA, object, func(s *Spec) { s.Clients.Authority = object })
			}
			return err
		}, Values: "secret/NAME or configmap/NAME, of the namespace, whose entry ca.crt verifies the certificates of clients of TLS"},
		{Key: lbPrefix + "client-auth", Sets: []Field{FieldClientAuth}, Values: "require, optional", read: func(r *reader, v string) error {
			if v = strings.ToLower(v); v != "require" && v != "optional" {
				return fmt.Errorf("%q is not one of require, optional", shorten(v))
			}
			r.set(FieldClientAuth, v, func(s *Spec) { s.Clients.Optional = v == "optional" })
			return nil
		}},
		{Key: lbPrefix + "client-subject-header", Sets: []Field{FieldClientField}, read: readClientField,
			Values: "a field that begins with X-, by which Pods get the subject of the client's certificate; " + DefaultClientField + " without it"},
		number(lbPrefix+"client-requests", 1, 100000, "a second", FieldClientRequests, func(s *Spec, n int) { s.Clients.Requests = n }),
		number(lbPrefix+"client-connections", 1, 100000, "connections", FieldClientConns, func(s *Spec, n int) { s.Clients.Connections = n }),
		number(lbPrefix+"request-body-limit", 1, 10<<20, "KiB", FieldRequestBody, func(s *Spec, n int) { s.Clients.Body = n }),
		word(lbPrefix+"underscore-headers", map[string]bool{"drop": false, "keep": true}, FieldUnderscores, false,
			func(s *Spec, keep bool) { s.Headers.Underscores = keep }),
		{Key: lbPrefix + "request-id", Sets: []Field{FieldRequestID}, read: readRequestID,
			Values: "x-request-id, traceparent, or both with a comma between"},
		{Key: LBCompress, Sets: []Field{FieldCompress}, read: readCompress, Values: "zstd, gzip, or both with a comma between, or off"},
	}
}

// Encodings are the content codings of answers that clients can have.
//
//nolint:gochecknoglobals // constant
var Encodings = []string{"zstd", "gzip"}

// ReadEncodings reads a list of them, the best first. It is not nil, and empty for "off".
func ReadEncodings(v string) ([]string, error) {
	all := []string{}
	if v == "off" {
		return all, nil
	}
	for item := range strings.SplitSeq(strings.ToLower(v), ",") {
		if item = strings.TrimSpace(item); !slices.Contains(Encodings, item) || slices.Contains(all, item) {
			return nil, fmt.Errorf("%q is not one of %s, once, or off", shorten(item), strings.Join(Encodings, ", "))
		}
		all = append(all, item)
	}
	return all, nil
}

func readCompress(r *reader, v string) error {
	all, err := ReadEncodings(v)
	if err == nil {
		r.set(FieldCompress, v, func(s *Spec) { s.Compress = all })
	}
	return err
}

func readRequestID(r *reader, v string) error {
	id, trace := false, false
	for item := range strings.SplitSeq(strings.ToLower(v), ",") {
		switch strings.TrimSpace(item) {
		case "x-request-id":
			id = true
		case "traceparent":
			trace = true
		default:
			return fmt.Errorf("%q is neither x-request-id nor traceparent", shorten(item))
		}
	}
	r.set(FieldRequestID, v, func(s *Spec) { s.Headers.RequestID, s.Headers.TraceParent = id, trace })
	return nil
}

// readClientField reads the name of a field. Names without X- have a meaning already, as Content-Length.
func readClientField(r *reader, v string) error {
	other := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-'
	}
	name := textproto.CanonicalMIMEHeaderKey(v)
	taken := strings.HasPrefix(name, "X-Forwarded-") || name == "X-Request-Id"
	if len(v) < 3 || len(v) > 64 || strings.ContainsFunc(v, other) || !strings.HasPrefix(name, "X-") || taken {
		return fmt.Errorf("%q is not a name of 3 to 64 letters, digits and hyphens that begins with X-, but not X-Forwarded- or X-Request-Id",
			shorten(v))
	}
	r.set(FieldClientField, name, func(s *Spec) { s.Headers.ClientCertificate = name })
	return nil
}

// finishClients rejects what no port can do: who asks for a check of clients must not have them served without it.
func (r *reader) finishClients() {
	has := func(f func(Listener) bool) bool { return slices.ContainsFunc(r.Spec.Listeners, f) }
	plainText := func(l Listener) bool { return !l.Protocol.IsTLS() }
	isHTTP := func(l Listener) bool { return l.Protocol.IsHTTP() }
	wrong := func(f Field, why string) {
		if o, said := r.Origins[f]; said {
			r.found(Invalid, o.From, o.Value, fmt.Sprintf("annotation %s: %s", o.From, why))
		}
	}
	c := &r.Spec.Clients
	switch {
	case c.Authority == "":
		wrong(FieldClientAuth, "nothing verifies certificates without "+lbPrefix+"client-ca")
		wrong(FieldClientField, "nothing verifies certificates without "+lbPrefix+"client-ca")
	case !c.Optional && has(plainText): // by the other port everybody would get in
		wrong(FieldClientCA, "a port of the Service is without TLS, where clients need no certificate: make it two Services, or ask for "+
			lbPrefix+"client-auth: optional")
	case !has(func(l Listener) bool { return l.Protocol.IsTLS() }):
		wrong(FieldClientCA, "no port has the protocol tls or https")
	case r.Spec.Headers.ClientCertificate == "":
		r.Spec.Headers.ClientCertificate = DefaultClientField
	}
	if !has(func(l Listener) bool { return l.Protocol != UDP && l.Protocol != SCTP }) {
		wrong(FieldClientConns, "no port is of TCP: sessions of UDP have no such bound")
	}
	if !has(isHTTP) {
		const why = "no port is of http or https: there are no requests in other protocols"
		wrong(FieldClientRequests, why)
		wrong(FieldRequestBody, why)
		for i, f := range r.Findings {
			if f.State == Applied && (f.Field == FieldUnderscores || f.Field == FieldRequestID || f.Field == FieldCompress) {
				r.Findings[i].State = Unused
				r.Findings[i].Text += ": has no effect, since no port is of http or https"
			}
		}
	}
}
