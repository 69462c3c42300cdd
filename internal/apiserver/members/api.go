package members

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// Paths of the API server.
const (
	// Path lists the members, and removes the one whose name follows.
	Path = "/fairlead/servers"
	// SelfPath shows the Status of the server that answers.
	SelfPath = "/fairlead/servers/self"
	// TokenPath creates and lists tokens, and revokes the one whose ID follows.
	TokenPath = "/fairlead/server-tokens"
	// JoinPath begins what a server asks that joins, with its token.
	JoinPath = "/fairlead/server-join/"
)

const (
	// requestTimeout bounds what a request asks etcd for. Without a quorum nothing is written.
	requestTimeout = 10 * time.Second
	// maxBody bounds the body of a request in bytes.
	maxBody = 64 << 10
)

// Options configure an API.
type Options struct {
	// Endpoint is that of the etcd of this machine, and Dial makes connections to it.
	Endpoint string
	Dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	// Server returns the etcd of this machine, which may be restarted.
	Server func() *etcdserver.EtcdServer
	// Authorities returns what this server trusts.
	Authorities func() *pki.Bundle
	// Authorizer decides who is an administrator of the cluster.
	Authorizer authorizer.Authorizer
	// Settings must be the same on all servers.
	Settings Settings
	// Files returns the files of pki/ that all servers must have alike.
	Files func() (map[string][]byte, error)
	// Leave removes the server at a URL from the endpoints of clients.
	Leave func(ctx context.Context, server string) error
	// Audit, which may be nil, gets each step of a server that joins once it is done. Other
	// requests pass the filters of the API server, and stand in the audit log by these.
	Audit func(Step)
	Log   *slog.Logger
}

// API is what servers and administrators ask a member.
type API struct {
	Options
	etcd   *clientv3.Client
	tokens tokens
	// recognise returns nil if a token is valid, without using it.
	recognise func(ctx context.Context, token string) error

	// changes is held while this process changes the membership.
	changes sync.Mutex

	gate *gate
}

// New returns the API of a member. Close ends it.
func New(o Options) (*API, error) {
	c, err := Local(o.Endpoint, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		return o.Dial(ctx, "unix", addr)
	}))
	if err != nil {
		return nil, err
	}
	registerMetrics()
	t := tokens{c, o.Authorities, time.Now}
	return &API{Options: o, etcd: c, tokens: t, recognise: t.known, gate: newGate(requestTimeout)}, nil
}

// Close releases what the API holds.
func (a *API) Close() error { return a.etcd.Close() }

// ServeHTTP answers what an administrator asks below Path and TokenPath.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	out, err := a.administer(ctx, r)
	Reply(w, out, err)
}

func (a *API) administer(ctx context.Context, r *http.Request) (any, error) {
	if err := MayAdminister(ctx, a.Authorizer); err != nil {
		return nil, err
	}
	name, hasName := strings.CutPrefix(r.URL.Path, Path+"/")
	id, hasID := strings.CutPrefix(r.URL.Path, TokenPath+"/")
	switch {
	case r.Method == http.MethodGet && r.URL.Path == SelfPath:
		return Self(ctx, a.etcd)
	case r.Method == http.MethodGet && r.URL.Path == Path:
		return List(ctx, a.etcd)
	case r.Method == http.MethodDelete && hasName:
		return nil, a.remove(ctx, name, r.URL.Query().Get("force") == "true")
	case r.Method == http.MethodGet && r.URL.Path == TokenPath:
		return a.tokens.list(ctx)
	case r.Method == http.MethodPost && r.URL.Path == TokenPath:
		var want Token
		if err := read(r, &want); err != nil {
			return nil, err
		}
		if !time.Now().Before(want.End) {
			return nil, apierrors.NewBadRequest("the token of a server needs an end to come")
		}
		made, err := a.tokens.create(ctx, want)
		return made.String(), err
	case r.Method == http.MethodDelete && hasID:
		found, err := a.tokens.revoke(ctx, id)
		if err == nil && !found {
			err = apierrors.NewNotFound(metav1.Unversioned.WithResource("servertokens").GroupResource(), id)
		}
		return nil, err
	}
	return nil, apierrors.NewMethodNotSupported(metav1.Unversioned.WithResource("servers").GroupResource(), r.Method)
}

// MayAdminister returns an error unless the user of a request may do everything. It is for what is worth
// the authority's keys, which a rule for paths does not give.
func MayAdminister(ctx context.Context, a authorizer.Authorizer) error {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return apierrors.NewUnauthorized("no user")
	}
	decision, _, err := a.Authorize(ctx, authorizer.AttributesRecord{
		User: u, Verb: "*", APIGroup: "*", APIVersion: "*", Resource: "*", ResourceRequest: true,
	})
	if err != nil {
		return err
	}
	if decision != authorizer.DecisionAllow {
		return apierrors.NewForbidden(metav1.Unversioned.WithResource("servers").GroupResource(), "",
			fmt.Errorf("user %q is not an administrator of the cluster", u.GetName()))
	}
	return nil
}

// remove removes a member. With force it may cost the others the quorum.
func (a *API) remove(ctx context.Context, name string, force bool) error {
	list, err := List(ctx, a.etcd)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(list, func(m Member) bool { return m.Name == name })
	if i < 0 {
		return apierrors.NewNotFound(metav1.Unversioned.WithResource("servers").GroupResource(), name)
	}
	m := list[i]
	if len(list) == 1 {
		return Conflict("%s is the only server", name)
	}
	id, err := parseID(m.ID)
	if err != nil {
		return err
	}
	leave := func() {
		if m.Server == "" {
			return
		}
		if err := a.Leave(ctx, m.Server); err != nil {
			a.Log.Warn("cannot remove the server from default/kubernetes; its Lease expires", "server", name, "err", err)
		}
	}
	server := a.Server()
	self := id == uint64(server.MemberID())
	if self { // afterwards it can write nothing; if it stays, it is back with its next renewal
		leave()
	}
	a.changes.Lock()
	defer a.changes.Unlock()
	if force { // all calls that read it have the lock
		server.Cfg.StrictReconfigCheck = false
		defer func() { server.Cfg.StrictReconfigCheck = true }()
	}
	switch _, err := server.RemoveMember(ctx, id); {
	case err == nil:
		changed(changeRemoved)
		a.Log.Info("a server was removed from the cluster", "server", name, "peer", m.Peer, "by", userOf(ctx), "force", force)
		if !self {
			leave()
		}
		return nil
	case errors.Is(err, etcderrors.ErrUnhealthy), errors.Is(err, etcderrors.ErrNotEnoughStartedMembers):
		return Conflict("without %s fewer than half of the servers would be up: start the others first, or remove the ones that are gone; "+
			"--force removes it all the same", name)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, etcderrors.ErrTimeout):
		return apierrors.NewServiceUnavailable("nothing can be changed now: fewer than half of the servers reach each other; " +
			"start them, or restore a backup ('fairlead restore --help')")
	default:
		return err
	}
}

// Settle promotes learners that have caught up while this server is the leader, and logs when there
// is none, until ctx ends.
func (a *API) Settle(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	waiting := map[string]bool{} // the learners that were logged
	led := true
	for {
		if now := a.Server().Leader() != 0; now != led {
			if led = now; led {
				a.Log.Info("the servers have a leader: writes are accepted")
			} else {
				a.Log.Error("the servers have no leader: nothing is written until more than half of them reach each other")
			}
		}
		if err := a.promote(ctx, waiting); err != nil && ctx.Err() == nil {
			a.Log.Debug("cannot promote a server; retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (a *API) promote(ctx context.Context, waiting map[string]bool) error {
	if a.Server().Leader() != a.Server().MemberID() {
		return nil
	}
	for _, m := range a.Server().Cluster().Members() {
		if !m.IsLearner || m.Name == "" { // one that has not started cannot have caught up
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		a.changes.Lock()
		_, err := a.Server().PromoteMember(ctx, uint64(m.ID))
		a.changes.Unlock()
		if errors.Is(err, etcderrors.ErrLearnerNotReady) {
			if !waiting[m.Name] {
				a.Log.Info("a server is catching up", "server", m.Name)
			}
			waiting[m.Name] = true
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		delete(waiting, m.Name)
		changed(changePromoted)
		a.Log.Info("a server has caught up and counts from now on", "server", m.Name)
		if err := a.tokens.joined(ctx, m.Name); err != nil {
			return fmt.Errorf("the token of %s: %w", m.Name, err)
		}
	}
	return nil
}

// Conflict returns an error that the present state of the cluster is the reason of (409).
func Conflict(format string, args ...any) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusConflict, Reason: metav1.StatusReasonConflict, Message: fmt.Sprintf(format, args...),
	}}
}

// read decodes the body of a request.
func read(r *http.Request, to any) error {
	d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return nil
}

// Reply writes out as JSON, or a Status of Kubernetes for an error.
func Reply(w http.ResponseWriter, out any, err error) {
	code := http.StatusOK
	if err != nil {
		var known apierrors.APIStatus
		if !errors.As(err, &known) {
			known = apierrors.NewInternalError(err)
		}
		s := known.Status()
		s.Kind, s.APIVersion = "Status", "v1"
		out, code = s, int(s.Code)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(out) // the client is gone
}

// Only answers for a server that is not one of several with embedded etcds.
func Only(external bool) http.Handler {
	err := Conflict("this server is the only one: start it with --cluster-init, and others can join (docs/install.md)")
	if external {
		err = Conflict("the etcd of --etcd-servers is not this server's: its own tools list, add and remove members")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { Reply(w, nil, err) })
}
