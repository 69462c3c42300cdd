package proxied

import (
	"context"
	"net/http"
	"runtime"
	"time"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/svc"
)

// logins verifies the passwords of all clients.
//
//nolint:gochecknoglobals // of the process, as its processors are
var logins = basic.NewVerifier(basic.SlotsOf(runtime.GOMAXPROCS(0)))

// tries bounds the passwords of a client that have to be verified for a route: of 100 at once, ten a second.
//
//nolint:gochecknoglobals // constant
var tries = []filter.Limit{{Each: time.Second / 10, AtOnce: 100}}

// login returns the answer for a client without a right name and password, nil for one that has them.
func (o *router) login(rule *gateway.Rule, r *http1.Request, from Origin) *Reply {
	users := o.users[rule.Basic.Source]
	if users == nil {
		return &Reply{Status: http.StatusServiceUnavailable} // the Secret has none, or has not been read yet
	}
	ask := &Reply{Status: http.StatusUnauthorized, Fields: []http1.Field{
		{Name: []byte("WWW-Authenticate"), Value: []byte(`Basic realm="` + rule.Basic.Realm + `"`)},
	}}
	value, _ := (&head{r: r}).Header("authorization")
	login, ok := basic.ReadLogin(value)
	switch {
	case !ok:
		return ask
	case logins.Knows(users, login):
		return nil
	}
	route := svc.Name{Namespace: rule.Route.Namespace, Name: rule.Route.Name.Name + " passwords"}
	if !o.usage.allowsBy(from.Client.Addr(), route, tries) {
		return RetryLater(http.StatusTooManyRequests)
	}
	right, busy := logins.Verify(context.Background(), rule.Basic.Secret.Namespace, users, login)
	switch {
	case busy:
		return RetryLater(http.StatusServiceUnavailable)
	case !right:
		return ask
	}
	return nil
}
