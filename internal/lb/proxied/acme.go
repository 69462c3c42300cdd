package proxied

import (
	"crypto/tls"
	"net/http"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// ACMEPort is the port at which an authority of ACME looks by HTTP-01, and acmePath is before the token (RFC 8555, 8.3).
const (
	ACMEPort = 80
	acmePath = "/.well-known/acme-challenge/"
)

// challenger is the Router of ACMEPort while an order is open. Only an authority that knows the token has an answer.
type challenger struct {
	tokens map[string]string
	// hosts are the answers of a front, by hosts and tokens.
	hosts map[string]map[string]string
	// others routes all other requests; nil: to the Pods of pods.
	others Router
	pods   *Config
	// bare is true for a port that the Service does not have.
	bare bool
}

// Route answers a challenge, and routes what is none as if there were no challenges.
func (o challenger) Route(r *http1.Request, from Origin) Route {
	token, is := strings.CutPrefix(string(r.Target), acmePath)
	if text := o.answer(token, r); is && text != "" && !from.Secure && string(r.Method) == http.MethodGet {
		return Route{Reply: &Reply{Status: http.StatusOK, Body: []byte(text),
			Fields: []http1.Field{{Name: []byte("Content-Type"), Value: []byte("application/octet-stream")}}}}
	}
	switch {
	case o.bare:
		return reply(http.StatusNotFound, "there is no such challenge of ACME")
	case o.others != nil:
		return o.others.Route(r, from)
	}
	return Route{To: o.pods}
}

// answer returns the answer for a token, "" if there is none. Of a front only a request for the token's host gets it.
func (o challenger) answer(token string, r *http1.Request) string {
	if len(o.hosts) > 0 {
		return o.hosts[hostpath.Host(string(r.Host))][token]
	}
	return o.tokens[token]
}

// challenge has a listener answer the challenges of HTTP-01.
func (v *Service) challenge(c *Config, l dialect.Listener) {
	if !v.Answers() || l.Protocol != dialect.HTTP || l.Port != ACMEPort {
		return
	}
	o := challenger{tokens: v.Tokens, others: c.Router, pods: c, bare: l.Name == ACMEListener}
	if v.Routes != nil {
		o.hosts = v.Routes.Tokens
	}
	c.Router = o
}

// ACMEListener is the name of a listener that only answers challenges. It cannot be one of a Service's port.
const ACMEListener = "*acme"

// ACMEProtocol is what an authority of ACME asks for by ALPN (RFC 8737).
const ACMEProtocol = "acme-tls/1"

// answerACME returns a configuration that answers only an authority of ACME with the certificates of challenges, by host
// names. Without challenges it does not.
func answerACME(c *tls.Config, challenges map[string]*tls.Certificate) *tls.Config {
	if len(challenges) == 0 && c.GetConfigForClient == nil {
		return c
	}
	c = c.Clone()
	if c.GetConfigForClient = nil; len(challenges) == 0 {
		return c
	}
	c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		cert := challenges[h.ServerName]
		if cert == nil || !slices.Equal(h.SupportedProtos, []string{ACMEProtocol}) {
			return nil, nil
		}
		return &tls.Config{
			Certificates: []tls.Certificate{*cert}, NextProtos: []string{ACMEProtocol}, MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true,
		}, nil
	}
	return c
}
