package members

import (
	"context"
	"sync"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// Step is what a server that joins was given.
type Step struct {
	// Path is that of the request.
	Path string
	// Server is the name that it asked for; Peer is where its etcd is, empty before it is added.
	Server, Peer string
	// Token is the ID of its token, From the address that it asked from, with the port.
	Token, From string
}

// The changes that are counted.
const (
	changeKeys     = "keys"     // a server got the keys of the cluster
	changeAdded    = "added"    // it became a member that does not count yet
	changePromoted = "promoted" // it counts
	changeRemoved  = "removed"
)

//nolint:gochecknoglobals // metrics of the process, as all of legacyregistry
var (
	changesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "fairlead_server_changes_total", StabilityLevel: metrics.ALPHA,
		Help: "Changes of the servers of the cluster that this one has made: keys given to one that joins, added, promoted to a vote, removed.",
	}, []string{"change"})
	registerMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(changesTotal)
		for _, c := range []string{changeKeys, changeAdded, changePromoted, changeRemoved} {
			changesTotal.WithLabelValues(c) // an increase from nothing is no increase to a query
		}
	})
)

func changed(what string) { changesTotal.WithLabelValues(what).Inc() }

// took counts and logs a step of a server that joins, and has it written into the audit log.
func (a *API) took(s Step, change, message string) {
	changed(change)
	a.Log.Info(message, "server", s.Server, "peer", s.Peer, "token", s.Token, "from", s.From)
	if a.Audit != nil {
		a.Audit(s)
	}
}

// tokenID returns the ID of a token that was accepted.
func tokenID(text string) string {
	t, _ := join.ParseServer(text)
	return t.ID
}

// userOf is the user of a request.
func userOf(ctx context.Context) string {
	if u, ok := request.UserFrom(ctx); ok {
		return u.GetName()
	}
	return ""
}
