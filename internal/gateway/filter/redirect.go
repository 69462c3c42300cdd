package filter

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Redirect answers with another place.
type Redirect struct {
	Scheme, Host string // "" is that of the request
	Port         uint16 // 0 without one
	Path         *PathChange
	Status       int
	// To, if not empty, is the place as it is; it may be a path.
	To string
}

// Location returns the value of the field Location for a request with an address scheme://host:port/path?query, of which
// host has no port.
func (d *Redirect) Location(scheme, host string, port uint16, path, query, prefix string) string {
	if d.To != "" && d.To[0] != '/' {
		return d.To
	}
	to := cmp.Or(d.Scheme, scheme)
	known := wellKnownPort(to)
	switch {
	case d.Port != 0:
		port = d.Port
	case d.Scheme != "" && known != 0:
		port = known
	}
	out := to + "://" + cmp.Or(d.Host, host)
	if port != 0 && port != known {
		out += ":" + strconv.Itoa(int(port))
	}
	if d.To != "" {
		return out + d.To
	}
	out += d.Path.Apply(path, prefix)
	if query != "" {
		out += "?" + query
	}
	return out
}

func wellKnownPort(scheme string) uint16 {
	switch scheme {
	case "http":
		return 80
	case "https":
		return 443
	}
	return 0
}

// ReadRedirect reads a redirect. wrong names the first invalid field.
func ReadRedirect(spec *gwv1.HTTPRequestRedirectFilter) (d *Redirect, wrong string) {
	d = &Redirect{Status: http.StatusFound}
	if d.Path, wrong = readPath(spec.Path); wrong != "" {
		return d, wrong
	}
	if spec.Scheme != nil {
		d.Scheme = *spec.Scheme
	}
	if spec.Hostname != nil {
		d.Host = string(*spec.Hostname)
	}
	if spec.Port != nil {
		d.Port = uint16(*spec.Port) //nolint:gosec // validated
	}
	if spec.StatusCode != nil {
		d.Status = *spec.StatusCode
	}
	switch {
	case !slices.Contains([]string{"", "http", "https"}, d.Scheme):
		wrong = "scheme: want http or https"
	case !slices.Contains([]int{301, 302, 303, 307, 308}, d.Status):
		wrong = "statusCode: want 301, 302, 303, 307 or 308"
	}
	return d, wrong
}
