package proxied

import (
	"cmp"
	"net/http"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// redirector is the Router of a port whose clients are sent to a port of https of the same host.
type redirector struct{ to uint16 }

// Route answers with the same place by https.
func (o redirector) Route(r *http1.Request, from Origin) Route {
	path, query, _ := strings.Cut(string(r.Target), "?")
	if !strings.HasPrefix(path, "/") {
		return reply(http.StatusBadRequest, badPath)
	}
	host := cmp.Or(hostpath.Host(string(r.Host)), from.At.Addr().String())
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		host = "[" + host + "]"
	}
	// As by 301, but with the method of the request.
	out := redirect(&filter.Redirect{Scheme: "https", Port: o.to, Status: http.StatusPermanentRedirect}, host, path, query, "", from)
	out.why = "the annotations of the Service send clients of this port to https"
	return out
}
