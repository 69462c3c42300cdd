package proxied

import (
	"crypto/tls"
	"slices"
)

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
