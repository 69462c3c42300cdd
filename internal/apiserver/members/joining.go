package members

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Settings are the values of flags that all servers must have alike, by the names of the flags.
type Settings map[string]string

// differences returns what of have, the settings of a server that joins, is not as in s.
func (s Settings) differences(have Settings) []string {
	all := maps.Clone(s)
	maps.Copy(all, have)
	var out []string
	for _, flag := range slices.Sorted(maps.Keys(all)) {
		if s[flag] != have[flag] {
			out = append(out, fmt.Sprintf("--%s is %s here and %s there", flag, orNone(have[flag]), orNone(s[flag])))
		}
	}
	return out
}

func orNone(value string) string {
	if value == "" {
		return "none"
	}
	return strconv.Quote(value)
}

// What a server asks that joins, and the answers.
type (
	bundleRequest struct {
		Name     string   `json:"name"`
		Settings Settings `json:"settings"`
	}
	bundle struct {
		Files map[string][]byte `json:"files"`
	}
	addRequest struct {
		Name string `json:"name"`
		Peer string `json:"peer"`
	}
	added struct {
		// Cluster is all members, with the new one, as etcd wants them.
		Cluster string `json:"cluster"`
	}
)

// Joining answers servers that join, and has next answer everybody else. It stands before the
// authentication of users: the token of a server identifies no user, so that none can be forged
// or impersonated.
func (a *API) Joining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		step, ok := strings.CutPrefix(r.URL.Path, JoinPath)
		if !ok {
			next.ServeHTTP(w, r)
			return
		}
		if !a.gate.enter(w) {
			Reply(w, nil, apierrors.NewTooManyRequests("other servers are joining", 1))
			return
		}
		defer a.gate.leave()
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		out, err := a.join(ctx, step, r)
		if err != nil {
			if unlogged, ok := a.gate.mayLog(time.Now()); ok {
				a.Log.Warn("rejected a server that asks to join", "from", r.RemoteAddr, "err", err, "unlogged", unlogged)
			}
		}
		Reply(w, out, err)
	})
}

// maxJoining bounds the requests of servers that join, and of who pretends to be one, at a time: each may
// ask etcd. rejectionLogged is the shortest time between two lines about rejected ones.
const (
	maxJoining      = 4
	rejectionLogged = time.Second
)

// gate bounds what those cost who have no more than the address of this server.
type gate struct {
	places  chan struct{}
	timeout time.Duration // of a request's body

	mu       sync.Mutex
	logged   time.Time
	unlogged int
}

func newGate(timeout time.Duration) *gate {
	return &gate{places: make(chan struct{}, maxJoining), timeout: timeout}
}

// enter takes a place, unless there is none, until leave. The request's body has to come in time.
func (g *gate) enter(w http.ResponseWriter) bool {
	select {
	case g.places <- struct{}{}:
	default:
		return false
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(g.timeout)) // HTTP/1 and HTTP/2 have it
	return true
}

func (g *gate) leave() { <-g.places }

// mayLog reports whether a rejection may be logged now, and how many were not since the last one.
func (g *gate) mayLog(now time.Time) (unlogged int, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now.Sub(g.logged) < rejectionLogged {
		g.unlogged++
		return 0, false
	}
	unlogged, g.logged, g.unlogged = g.unlogged, now, 0
	return unlogged, true
}

func (a *API) join(ctx context.Context, step string, r *http.Request) (any, error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || r.Method != http.MethodPost {
		return nil, unauthorized(errToken)
	}
	if err := a.recognise(ctx, token); err != nil { // before the body, which may be slow
		return nil, tokenStatus(err)
	}
	switch step {
	case "bundle":
		var q bundleRequest
		if err := read(r, &q); err != nil {
			return nil, err
		}
		return a.bundle(ctx, token, q, r.RemoteAddr)
	case "add":
		var q addRequest
		if err := read(r, &q); err != nil {
			return nil, err
		}
		return a.add(ctx, token, q, r.RemoteAddr)
	}
	return nil, unauthorized(errToken)
}

// bundle gives a server what it needs to be one.
func (a *API) bundle(ctx context.Context, token string, q bundleRequest, from string) (*bundle, error) {
	if err := a.accept(ctx, token, q.Name); err != nil {
		return nil, err
	}
	if diff := a.Settings.differences(q.Settings); len(diff) > 0 {
		return nil, Conflict("the servers of a cluster have these alike: %s", strings.Join(diff, "; "))
	}
	files, err := a.Files()
	if err != nil {
		return nil, err
	}
	a.took(Step{Path: JoinPath + "bundle", Server: q.Name, Token: tokenID(token), From: from}, changeKeys,
		"gave the cluster's keys to a server that joins")
	return &bundle{files}, nil
}

// accept returns an error unless the token may be used by the server of that name.
func (a *API) accept(ctx context.Context, token, name string) error {
	if err := CheckName(name); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if err := a.tokens.use(ctx, token, name); err != nil {
		return tokenStatus(err)
	}
	return nil
}

// tokenStatus returns what is answered to an error of tokens.
func tokenStatus(err error) error {
	if bad := (*tokenError)(nil); errors.As(err, &bad) {
		return unauthorized(err)
	}
	return apierrors.NewServiceUnavailable(err.Error())
}

// add adds a server as a learner. One that was added and has not started is as before.
func (a *API) add(ctx context.Context, token string, q addRequest, from string) (*added, error) {
	if err := a.accept(ctx, token, q.Name); err != nil {
		return nil, err
	}
	if err := checkPeer(q.Peer); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	a.changes.Lock()
	defer a.changes.Unlock()
	list, err := a.etcd.MemberList(ctx)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(err.Error())
	}
	known := false
	cluster := []string{q.Name + "=" + q.Peer}
	for _, m := range list.Members {
		at := slices.Contains(m.PeerURLs, q.Peer)
		switch {
		case at && m.Name == "":
			known = true
			continue
		case at || m.Name == q.Name:
			return nil, Conflict("there is a server %s at %s already: remove it first with 'fairlead server remove %[1]s', "+
				"or choose another --server-name", m.Name, first(m.PeerURLs))
		}
		for _, u := range m.PeerURLs {
			cluster = append(cluster, fmt.Sprintf("member-%s=%s", idText(m.ID), u))
		}
	}
	if !known {
		urls, err := types.NewURLs([]string{q.Peer})
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		now := time.Now()
		if _, err := a.Server().AddMember(ctx, *membership.NewMemberAsLearner("", urls, "", &now)); err != nil {
			return nil, cannotAdd(err)
		}
		a.took(Step{Path: JoinPath + "add", Server: q.Name, Peer: q.Peer, Token: tokenID(token), From: from}, changeAdded,
			"added a server, which does not count until it has caught up")
	}
	return &added{strings.Join(cluster, ",")}, nil
}

// cannotAdd returns an error that a server waits for the end of.
func cannotAdd(err error) error {
	switch {
	case errors.Is(err, membership.ErrTooManyLearners):
		return apierrors.NewServiceUnavailable("another server is joining, and one does at a time; " +
			"if it never comes, remove it: 'fairlead server members', 'fairlead server remove NAME'")
	case errors.Is(err, etcderrors.ErrUnhealthy):
		return apierrors.NewServiceUnavailable(fmt.Sprintf("a server is added when most of the others, with it, have reached each other for %s; "+
			"if this stays, see 'fairlead server members'", etcdserver.HealthInterval))
	}
	return apierrors.NewServiceUnavailable(err.Error())
}

// checkPeer returns what is wrong with the URL of a peer.
func checkPeer(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" {
		return fmt.Errorf("%q is not the URL of a peer: want https://ADDRESS:PORT", text)
	}
	at, err := netip.ParseAddrPort(u.Host)
	if err != nil || text != "https://"+at.String() || !at.Addr().IsGlobalUnicast() {
		return fmt.Errorf("%q is not the URL of a peer: want https://ADDRESS:PORT", text)
	}
	return nil
}

func unauthorized(err error) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnauthorized, Reason: metav1.StatusReasonUnauthorized, Message: err.Error(),
	}}
}

func parseID(text string) (uint64, error) { return strconv.ParseUint(text, 16, 64) }
