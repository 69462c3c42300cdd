package api

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
)

// loopbackAtOnce bounds the questions of a machine's processes that are answered at a time.
const loopbackAtOnce = 4

// OnLoopback answers by views on a listener without authentication, to processes of this machine, and to users for whom the API
// server forwards a port to it: they have the right to create pods/portforward. Requests by an address of the network get 403. The
// handlers are by path.
func OnLoopback(views map[string]View) map[string]http.Handler {
	places := make(chan struct{}, loopbackAtOnce)
	out := map[string]http.Handler{}
	for name, view := range views {
		limited := func(w http.ResponseWriter, q *http.Request) {
			if !fromLoopback(q) {
				fail(w, httpError{http.StatusForbidden, "ask this on the loopback device of the node"})
				return
			}
			serveView(context.WithoutCancel(q.Context()), func(ctx context.Context, query url.Values) (any, error) {
				select {
				case places <- struct{}{}:
					defer func() { <-places }()
				default:
					return nil, Busy("other questions are being answered: ask again")
				}
				return view(ctx, query)
			}, w, q)
		}
		out["GET /"+name] = http.HandlerFunc(limited)
	}
	return out
}

// fromLoopback reports whether both ends of a request are on this machine, and it is not from a page whose name leads here.
func fromLoopback(q *http.Request) bool {
	to, ok := q.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return ok && loopback(to.String()) && loopback(q.RemoteAddr) && loopback(q.Host)
}

func loopback(hostPort string) bool {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		host = hostPort
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}
