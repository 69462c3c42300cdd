package proxied

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// config is what counts for a new connection.
type config struct {
	service svc.Name
	owner   logship.Owner // of access logs
	spec    *dialect.Spec
	// protocol is that of clients, and backend that of Pods.
	protocol, backend dialect.Protocol

	cookie    string      // the name of the one by which requests stick, empty for none
	tls       *tls.Config // nil without TLS
	pods      podTLS      // of a backend with TLS
	transport any         // of HTTP, by engine.configure
	pool      *pool
	usage     *usage
	logs      *accessLog // nil if none is asked for
}

// admits reports whether a client is within the ranges that the Service is for.
func (c *config) admits(client netip.Addr) bool {
	return len(c.spec.SourceRanges) == 0 || contains(c.spec.SourceRanges, client)
}

// record writes a line of the access log, if one is asked for.
func (c *config) record(e entry) {
	if c.logs == nil {
		return
	}
	e.owner, e.at = c.owner, time.Now()
	c.logs.write(&e, c.spec.AccessLog)
}

// newConfig returns the configuration of a listener, or why there is none. old is the one before, or nil.
func newConfig(v *Service, l dialect.Listener, old *config) (*config, error) {
	c := &config{
		service: v.Name, owner: logship.OwnerOf(v.Name, v.Key), spec: &v.Spec, protocol: l.Protocol, backend: l.Backend, pods: podTLSOf(v),
	}
	if !slices.Contains([]dialect.Protocol{dialect.TCP, dialect.TLS, dialect.HTTP, dialect.HTTPS, dialect.UDP}, l.Protocol) {
		return nil, fmt.Errorf("port %d: %s cannot be carried in the proxied way", l.Port, l.Protocol)
	}
	if multiplexed := l.Backend == dialect.H2C || l.Backend == dialect.GRPC; multiplexed && v.Spec.ProxyProtocol != 0 {
		return nil, fmt.Errorf("port %d: Pods cannot have the PROXY protocol by %s: its connections are of many clients", l.Port, l.Backend)
	}
	if v.Spec.Sticky.Cookie && l.Protocol.IsHTTP() {
		c.cookie = cookieName(v.Key)
	}
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
	c.tls = &tls.Config{
		Certificates: v.Certificates, MinVersion: policy.Least, MaxVersion: policy.Most, CipherSuites: policy.Suites, NextProtos: v.Spec.ALPN,
	}
	if l.Protocol == dialect.HTTPS && len(c.tls.NextProtos) == 0 {
		c.tls.NextProtos = []string{"h2", "http/1.1", "http/1.0"}
	}
	if old != nil && old.tls != nil && sameTLS(old.tls, c.tls) {
		c.tls = old.tls // it has the keys of session tickets
		if !sameStaples(c.tls.Certificates, v.Certificates) {
			c.tls = old.tls.Clone()
			c.tls.Certificates = v.Certificates
		}
	}
	c.tls = answerACME(c.tls, v.Challenges)
	return c, nil
}

// sameTLS reports whether two configurations of newConfig are alike.
func sameTLS(a, b *tls.Config) bool {
	return a.MinVersion == b.MinVersion && a.MaxVersion == b.MaxVersion && slices.Equal(a.CipherSuites, b.CipherSuites) &&
		slices.Equal(a.NextProtos, b.NextProtos) && slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, bytes.Equal)
	})
}

// sameStaples reports whether certificates that are alike have the same OCSP responses.
func sameStaples(a, b []tls.Certificate) bool {
	return slices.EqualFunc(a, b, func(x, y tls.Certificate) bool { return bytes.Equal(x.OCSPStaple, y.OCSPStaple) })
}
