package nginx

// HTTPS is when requests without TLS are sent to the same place with it.
type HTTPS int

// The times.
const (
	NeverHTTPS HTTPS = iota
	AskedHTTPS       // if TLS is asked for at the host
	ForceHTTPS
)

// HTTPS returns when requests are sent to HTTPS. secured is true for an Ingress whose class asks for that where TLS is asked for.
func (o *Options) HTTPS(secured bool) HTTPS {
	if o.SSLRedirect != nil {
		secured = *o.SSLRedirect
	}
	switch {
	case o.ForceSSL:
		return ForceHTTPS
	case secured:
		return AskedHTTPS
	}
	return NeverHTTPS
}

// Problem returns why no request may pass, and what becomes of requests then. It is "" if they may.
func (o *Options) Problem() string {
	switch {
	case o.Closed == "":
		return ""
	case o.Canary != nil:
		return o.Closed + "; the canary gets no requests"
	case o.ClosedHost:
		return o.Closed + "; requests for its hosts are answered with 503"
	}
	return o.Closed + "; requests for its paths are answered with 503"
}
