package certs

import (
	"crypto/x509"
	"net/http"
	"runtime"
	"sync"
	"time"
	"weak"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	requestx509 "k8s.io/apiserver/pkg/authentication/request/x509"
)

// rememberFor is how long the result of a verification is used at most.
const rememberFor = time.Minute

// remembering authenticates requests by client certificates. It verifies the certificate of a connection with its first request, then once
// in rememberFor and after a change of the authorities: its signatures are a twentieth of the work of a write. Failures are not
// remembered. The histogram apiserver_client_certificate_expiration_seconds counts verifications.
type remembering struct {
	cas    *ClientCAs
	verify authenticator.Request
	known  sync.Map // *recognized by weak.Pointer[x509.Certificate], for as long as the certificate is in use
}

// recognized is whose a certificate is.
type recognized struct {
	response *authenticator.Response
	roots    *x509.CertPool
	until    time.Time
}

// Authenticator returns the authenticator of requests with certificates that the authorities have signed.
func (c *ClientCAs) Authenticator() authenticator.Request {
	return &remembering{cas: c, verify: requestx509.NewDynamic(c.VerifyOptions, c.users())}
}

// AuthenticateRequest has no opinion of requests without a certificate.
func (r *remembering) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return nil, false, nil
	}
	leaf, now := req.TLS.PeerCertificates[0], time.Now()
	key := weak.Make(leaf)
	opts, _ := r.cas.VerifyOptions() // before the verification: if they change during it, the result is not used again
	if v, had := r.known.Load(key); had {
		if k := v.(*recognized); k.roots == opts.Roots && now.Before(k.until) {
			return k.response, true, nil
		}
	}
	response, ok, err := r.verify.AuthenticateRequest(req)
	if !ok || err != nil || r.cas.other(leaf) { // ClientCAs.since wants to know when another authority's was used last
		return response, ok, err
	}
	next := &recognized{response, opts.Roots, now.Add(rememberFor)}
	for _, c := range req.TLS.PeerCertificates {
		if c.NotAfter.Before(next.until) {
			next.until = c.NotAfter
		}
	}
	if _, had := r.known.Swap(key, next); !had {
		runtime.AddCleanup(leaf, func(key weak.Pointer[x509.Certificate]) { r.known.Delete(key) }, key)
	}
	return response, ok, err
}
