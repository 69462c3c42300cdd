package parts

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
)

// History is the View with what this node had for a Service: its query has service (NAMESPACE/NAME) and since, a duration
// such as 10m. With at (RFC 3339) in place of since it is proxy.Then.
func History(p func() *proxy.Proxy) api.View {
	return func(_ context.Context, query url.Values) (any, error) {
		name, err := svc.ParseName(query.Get("service"))
		if err != nil {
			return nil, api.BadQuery(fmt.Sprintf("service: %v", err))
		}
		if text := query.Get("at"); text != "" {
			at, err := time.Parse(time.RFC3339Nano, text)
			if err != nil {
				return nil, api.BadQuery(fmt.Sprintf("at: %q is not a time of RFC 3339", text))
			}
			return proxy.ThenOf(p(), name, at), nil
		}
		since, err := time.ParseDuration(query.Get("since"))
		if err != nil || since <= 0 {
			return nil, api.BadQuery(fmt.Sprintf("since: %q is not a duration such as 10m", query.Get("since")))
		}
		return p().History(name, time.Now().Add(-since)), nil
	}
}

// Views are the questions that a node answers its processes about its proxy, by name. They do not tell who has connections.
func Views(p *proxy.Proxy, counts *flows.Reader) map[string]api.View {
	running := func() *proxy.Proxy { return p }
	return map[string]api.View{
		"explain": Explain(running), "history": History(running), "services": Services(func() *flows.Reader { return counts }, false),
	}
}

// Services is the View with what this node has counted of connections to Services. With clients=true it also has who has connections
// now; may reports whether the user may know that.
func Services(r func() *flows.Reader, may bool) api.View {
	return func(ctx context.Context, query url.Values) (any, error) {
		return r().Report(ctx, may && query.Get("clients") == "true")
	}
}
