package proxied

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Config is what counts for a new connection.
type Config struct {
	Service svc.Name
	Spec    *dialect.Spec
	// Protocol is that of clients, and Backend that of Pods.
	Protocol, Backend dialect.Protocol
	// TLS is nil without TLS.
	TLS *tls.Config
	// Pods is how TLS to Pods begins, if Backend has TLS.
	Pods pods.TLS
	Pool *pods.Pool
	// Sticky is of requests of HTTP.
	Sticky pods.Sticky
	// Router chooses where a request of HTTP goes. Without one all go to Pool.
	Router Router
	// Transport is of HTTP, by Engine.Configure.
	Transport any

	clusterIP bool // the clients ask for a ClusterIP

	usage   *usage
	streams *streams       // nil unless connections are routed as a whole
	owner   logship.Owner  // of access logs
	logs    *accesslog.Log // nil if none is asked for
	backend svc.Name       // of routes: whose Pods they are
	watched seen.Requests  // nil if none are shown
	traced  *request.Watch // nil if none are traced
}

// Destination returns the Service that has the Pods.
func (c *Config) Destination() svc.Name {
	if c.backend != (svc.Name{}) {
		return c.backend
	}
	return c.Service
}

// Watches reports whether to Show the request that begins now.
func (c *Config) Watches() bool { return c.watched != nil && c.watched.Wants() }

// Show shows a request for which Watches was true.
func (c *Config) Show(r *seen.Request) { c.watched.Request(r) }

// Trace returns the Record of the request that begins now, nil unless a user traces it.
func (c *Config) Trace(r *http1.Request) *request.Record {
	if !c.traced.Armed() {
		return nil
	}
	return c.traced.Begin(mark.TraceID(r))
}

// Admits reports whether a client is within the ranges that the Service is for.
func (c *Config) Admits(client netip.Addr) bool {
	return c.Spec.Admits(client)
}

// Verifies reports whether another TLS connection of a client than one with t as its configuration would do: with nil there
// was none. A kept connection has the rights of a new one, also after clients need another certificate.
func (c *Config) Verifies(t *tls.Config) bool {
	if c.TLS == nil || c.TLS.ClientCAs == nil || c.TLS.ClientAuth == tls.RequestClientCert {
		return true
	}
	return t != nil && t.ClientCAs == c.TLS.ClientCAs && (t.ClientAuth == c.TLS.ClientAuth || c.TLS.ClientAuth == tls.VerifyClientCertIfGiven)
}

// NoTLS counts a client with which TLS has failed if that is for its certificate: it gave none that it had to, or none that is
// verified.
func (c *Config) NoTLS(err error) {
	if c.TLS.ClientCAs != nil && (errors.As(err, new(*tls.CertificateVerificationError)) || isNoCertificate(err)) {
		c.usage.traffic.Rejected(traffic.Unverified)
	}
}

// isNoCertificate reports whether TLS has failed since a client gave no certificate: package tls has no type for that.
func isNoCertificate(err error) bool {
	return err != nil && strings.Contains(err.Error(), "client didn't provide a certificate")
}

// Traffic counts what the Service carries.
func (c *Config) Traffic() *traffic.Service { return c.usage.traffic }

// Carried counts a request that has ended, and the bytes of its bodies. route may be nil.
func (c *Config) Carried(route *traffic.Route, status int, took time.Duration, received, sent int64) {
	route.Request(status, took)
	c.usage.traffic.Request(status, took)
	c.usage.traffic.Carried(received, sent)
}

// Logs reports whether the access log is asked for.
func (c *Config) Logs() bool { return c.logs != nil }

// Record writes a line of the access log, if one is asked for.
func (c *Config) Record(e accesslog.Entry) {
	if c.logs == nil {
		return
	}
	e.Owner, e.At = c.owner, time.Now()
	c.logs.Write(&e, c.Spec.AccessLog)
}

// newConfig returns the configuration of a listener, or why there is none. old is the one before, or nil.
func newConfig(v *Service, l dialect.Listener, old *Config) (*Config, error) {
	c := &Config{
		Service: v.Name, Spec: &v.Spec, Protocol: l.Protocol, Backend: l.Backend, Pods: v.PodTLS(), owner: logship.OwnerOf(v.Name, v.Key),
		clusterIP: v.ClusterIP,
	}
	if !slices.Contains([]dialect.Protocol{dialect.TCP, dialect.TLS, dialect.HTTP, dialect.HTTPS, dialect.UDP}, l.Protocol) {
		return nil, fmt.Errorf("port %d: %s cannot be carried in the proxied way", l.Port, l.Protocol)
	}
	if multiplexed := l.Backend == dialect.H2C || l.Backend == dialect.GRPC; multiplexed && v.Spec.ProxyProtocol != 0 {
		return nil, fmt.Errorf("port %d: Pods cannot have the PROXY protocol by %s: its connections are of many clients", l.Port, l.Backend)
	}
	if l.Protocol.IsHTTP() {
		c.Sticky = pods.NewSticky(v.Key, v.Spec.Sticky)
	}
	if l.Redirect != 0 {
		c.Router = redirector{l.Redirect}
	}
	if v.Routes != nil { // its router comes later
		return c, v.Routes.configure(c, l, old, v.Challenges)
	}
	v.challenge(c, l)
	if !l.Protocol.IsTLS() {
		return c, nil
	}
	if len(v.Certificates) == 0 {
		return nil, fmt.Errorf("port %d: there is no certificate for %s", l.Port, l.Protocol)
	}
	policy, ok := dialect.TLSPolicyOf(v.Spec.TLSPolicy)
	if !ok {
		return nil, fmt.Errorf("port %d: there is no TLS policy %.100q", l.Port, v.Spec.TLSPolicy)
	}
	c.TLS = &tls.Config{
		Certificates: v.Certificates, MinVersion: policy.Least, MaxVersion: policy.Most, CipherSuites: policy.Suites, NextProtos: v.Spec.ALPN,
	}
	if v.Spec.Clients.Authority != "" {
		if v.ClientRoots == nil {
			return nil, fmt.Errorf("port %d: there is nothing to verify clients by", l.Port)
		}
		c.TLS.ClientCAs, c.TLS.ClientAuth = v.ClientRoots, tls.RequireAndVerifyClientCert
		if v.Spec.Clients.Optional {
			c.TLS.ClientAuth = tls.VerifyClientCertIfGiven
		}
	}
	if l.Protocol == dialect.HTTPS && len(c.TLS.NextProtos) == 0 {
		c.TLS.NextProtos = []string{"h2", "http/1.1", "http/1.0"}
	}
	if old != nil && old.TLS != nil && sameTLS(old.TLS, c.TLS) {
		c.TLS = old.TLS // it has the keys of session tickets
		if !sameStaples(c.TLS.Certificates, v.Certificates) {
			c.TLS = old.TLS.Clone()
			c.TLS.Certificates = v.Certificates
		}
	}
	c.TLS = answerACME(c.TLS, v.Challenges)
	return c, nil
}

// sameTLS reports whether two configurations of newConfig are alike.
func sameTLS(a, b *tls.Config) bool {
	return a.ClientCAs == b.ClientCAs && a.ClientAuth == b.ClientAuth && a.MinVersion == b.MinVersion &&
		a.MaxVersion == b.MaxVersion && slices.Equal(a.CipherSuites, b.CipherSuites) &&
		slices.Equal(a.NextProtos, b.NextProtos) && slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, bytes.Equal)
	})
}

// sameStaples reports whether certificates that are alike have the same OCSP responses.
func sameStaples(a, b []tls.Certificate) bool {
	return slices.EqualFunc(a, b, func(x, y tls.Certificate) bool { return bytes.Equal(x.OCSPStaple, y.OCSPStaple) })
}
