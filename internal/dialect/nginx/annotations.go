package nginx

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// annotation is how one annotation is read.
type annotation struct {
	read func(r *reader, value string) error
	// none is why it has no effect, if read is nil.
	none string
	// guards means that no request may pass if the value cannot be done, and host that none may at the whole host, for which
	// ingress-nginx has it.
	guards, host bool
	// names means that the value is a name or an address: any text asks for something.
	names bool
	// needs names another annotation without which it has no effect.
	needs string
	// long lets the value have maxList bytes.
	long bool
	// redirects means that it may send clients elsewhere than to the same place by HTTPS.
	redirects bool
}

// Names returns the names of the annotations that are known, without the prefix, in order.
func Names() []string {
	var out []string
	for name := range annotations {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// off reports whether the value of an annotation that is not served asks for nothing.
func (a *annotation) off(value string) bool {
	if a.names {
		return value == ""
	}
	on, err := strconv.ParseBool(value)
	return err == nil && !on || slices.Contains([]string{"", "off"}, strings.ToLower(value))
}

// parse reads a value of bounded length that is one line of text.
func (a *annotation) parse(r *reader, value string) error {
	most := maxValue
	if a.long {
		most = maxList
	}
	switch {
	case len(value) > most:
		return fmt.Errorf("the value has more than %d bytes", most)
	case strings.ContainsFunc(value, func(c rune) bool { return c < ' ' && !(a.long && (c == '\n' || c == '\t')) || c == 0x7f }):
		return errors.New("the value has a control character")
	}
	return a.read(r, value)
}

const (
	snippet   = "there is no nginx to give a snippet to, and it could protect something"
	unserved  = "it is not served here"
	buffering = "nothing is stored between client and Pod: bodies and answers pass as they come"
	sizes     = "buffers have a fixed bound"
	tracing   = "tracing and logs are settings of the load balancer (docs/loadbalancer.md)"
	noTLS     = "TLS with clients has the policy of the load balancer"
	podTLS    = "TLS to Pods has the versions and ciphers of Go"
	noBrowser = "browsers have no use for it any more"
)

// annotations are by name without the prefix.
//
//nolint:gochecknoglobals // constant
var annotations = func() map[string]annotation {
	all := map[string]annotation{
		"rewrite-target":       {read: readRewrite, guards: true},
		"use-regex":            {read: flag(func(r *reader, on bool) { r.UseRegex = on }), guards: true},
		"app-root":             {read: readAppRoot, redirects: true},
		"ssl-redirect":         {read: flag(func(r *reader, on bool) { r.SSLRedirect = &on }), guards: true},
		"force-ssl-redirect":   {read: flag(func(r *reader, on bool) { r.ForceSSL = on }), guards: true},
		"from-to-www-redirect": {read: flag(func(r *reader, on bool) { r.WWW = on }), redirects: true},
		"server-alias":         {read: readAliases},
		"backend-protocol":     {read: readBackend, guards: true},
		"upstream-vhost":       {read: readBackendHost, guards: true},
		"x-forwarded-prefix":   {read: readForwardedPrefix, needs: "rewrite-target"},
		"proxy-body-size":      {read: readBody},
		"proxy-read-timeout":   {read: seconds(func(r *reader, n int) { r.Timeout = second(n) })},
		"proxy-send-timeout":   {read: seconds(func(r *reader, n int) { r.send = second(n) })},

		"whitelist-source-range": {read: readWhitelist, guards: true, long: true},
		"allowlist-source-range": {read: readRanges(func(o *Options) *[]prefix { return &o.Allow }), guards: true, long: true},
		"denylist-source-range":  {read: readRanges(func(o *Options) *[]prefix { return &o.Deny }), guards: true, long: true},

		"limit-rps":              {read: number(0, 1_000_000, func(r *reader, n int) { r.PerSecond = n }), guards: true},
		"limit-rpm":              {read: number(0, 1_000_000, func(r *reader, n int) { r.PerMinute = n }), guards: true},
		"limit-connections":      {read: number(0, 1_000_000, func(r *reader, n int) { r.AtATime = n }), guards: true},
		"limit-burst-multiplier": {read: number(1, 1000, func(r *reader, n int) { r.Burst = n }), guards: true},
		"limit-whitelist":        {read: readRanges(func(o *Options) *[]prefix { return &o.Unlimited }), guards: true, long: true},

		"satisfy": {read: readSatisfy, guards: true},

		"proxy-connect-timeout":   {none: "a Pod has 5 seconds to accept a connection"},
		"proxy-request-buffering": {none: buffering}, "proxy-buffering": {none: buffering},
		"client-body-buffer-size": {none: sizes}, "proxy-buffer-size": {none: sizes}, "proxy-buffers-number": {none: sizes},
		"proxy-busy-buffers-size": {none: sizes}, "proxy-max-temp-file-size": {none: buffering},
		"proxy-http-version": {none: "the version follows from the Pods' protocol"}, "preserve-trailing-slash": {none: "the slash stays"},
		"http2-push-preload": {none: noBrowser}, "connection-proxy-header": {none: "fields of connections belong to the load balancer"},
		"enable-rewrite-log": {none: tracing}, "enable-access-log": {none: tracing}, "enable-opentelemetry": {none: tracing},
		"opentelemetry-trust-incoming-span": {none: tracing}, "opentelemetry-operation-name": {none: tracing},
		"ssl-ciphers": {none: noTLS}, "ssl-prefer-server-ciphers": {none: noTLS},
		"load-balance":     {none: "it is a setting of the load balancer for all Ingresses: fairlead.dev/lb-balance"},
		"upstream-hash-by": {none: unserved}, "upstream-hash-by-subset": {none: unserved}, "upstream-hash-by-subset-size": {none: unserved},
		"service-upstream":   {none: "Pods are reached without the Service's address, and leave as their endpoints do"},
		"default-backend":    {read: readDefaultBackend},
		"custom-http-errors": {read: readErrors, needs: "default-backend"},
		"disable-proxy-intercept-errors": {
			read: flag(func(r *reader, on bool) { r.errors.Own = on }), needs: "custom-http-errors",
		},
		"custom-headers": {none: unserved}, "mirror-target": {none: unserved}, "mirror-request-body": {none: unserved},
		"mirror-host": {none: unserved}, "proxy-cookie-domain": {none: unserved}, "proxy-cookie-path": {none: unserved},
		"proxy-redirect-from": {none: unserved}, "proxy-redirect-to": {none: unserved}, "relative-redirects": {none: unserved},
		"proxy-ssl-ciphers": {none: podTLS}, "proxy-ssl-protocols": {none: podTLS},
		"proxy-ssl-name": {none: "the Pods' certificates are not verified"}, "proxy-ssl-server-name": {none: unserved},
		"proxy-ssl-verify-depth": {none: "the Pods' certificates are not verified"},
		"enable-global-auth":     {none: "there is no authorization for all Ingresses", guards: true},

		"ssl-passthrough": {none: "Ingresses end TLS here; a TLSRoute passes it on (docs/gateway.md)", guards: true, host: true},
		"server-snippet":  {none: snippet, guards: true, host: true},
		"stream-snippet":  {none: snippet, guards: true, host: true},
	}
	for _, name := range []string{"configuration-snippet", "auth-snippet", "modsecurity-snippet"} {
		all[name] = annotation{none: snippet, guards: true}
	}
	for _, name := range []string{
		"auth-tls-secret", "enable-modsecurity", "enable-owasp-core-rules",
		"proxy-ssl-verify", "proxy-ssl-secret", "limit-rate", "limit-rate-after",
	} {
		all[name] = annotation{
			none: unserved + ", and no request may pass without it", guards: true, host: name == "auth-tls-secret",
			names: strings.HasPrefix(name, "auth-") || strings.HasSuffix(name, "-secret"),
		}
	}
	for root, names := range map[string][]string{
		"auth-tls-secret": {
			"auth-tls-verify-depth", "auth-tls-verify-client", "auth-tls-error-page", "auth-tls-pass-certificate-to-upstream", "auth-tls-match-cn",
		},
		"enable-modsecurity": {"modsecurity-transaction-id"},
	} {
		for _, name := range names {
			all[name] = annotation{none: "it is a part of " + root}
		}
	}
	addAuth(all)
	addBasic(all)
	addCORS(all)
	addSessions(all)
	addCanaries(all)
	addRetries(all)
	addRedirects(all)
	return all
}()
