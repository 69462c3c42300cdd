package members

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

const (
	// joinPause is the time between two attempts of a server to join, joinWarning that between two
	// messages about it.
	joinPause   = time.Second
	joinWarning = 15 * time.Second
	// selfTimeout bounds the answer of one server in a list.
	selfTimeout = 2 * time.Second
)

// Joiner is a server that joins.
type Joiner struct {
	// Server is the URL of a server of the cluster.
	Server string
	Token  join.Token
	// Name and Peer are as in State.
	Name, Peer string
	Log        *slog.Logger
}

// Bundle returns the files of pki/ that all servers have alike, once a server gives them.
func (j Joiner) Bundle(ctx context.Context, settings Settings) (map[string][]byte, error) {
	var b bundle
	err := j.ask(ctx, "bundle", bundleRequest{j.Name, settings}, &b)
	return b.Files, err
}

// Add has this server added as a learner, and returns all members as etcd wants them.
func (j Joiner) Add(ctx context.Context) (string, error) {
	var out added
	err := j.ask(ctx, "add", addRequest{j.Name, j.Peer}, &out)
	return out.Cluster, err
}

// ask asks until there is an answer that does not change by waiting.
func (j Joiner) ask(ctx context.Context, step string, question, answer any) error {
	var warned time.Time
	for {
		err := j.try(ctx, step, question, answer)
		if err == nil || final(err) {
			return err
		}
		if time.Since(warned) > joinWarning {
			warned = time.Now()
			j.Log.Warn("cannot join the cluster; retrying", "server", j.Server, "err", err, "after", joinPause)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(joinPause):
		}
	}
}

// final reports whether a server has rejected a request for good.
func final(err error) bool {
	return apierrors.IsUnauthorized(err) || apierrors.IsConflict(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) ||
		apierrors.IsForbidden(err) || join.IsOtherCluster(err)
}

func (j Joiner) try(ctx context.Context, step string, question, answer any) error {
	cfg, err := j.Token.Config(ctx, j.Server)
	if err != nil {
		return err
	}
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	return call(ctx, cfg, http.MethodPost, JoinPath+step, body, answer)
}

// call asks the server of cfg, and decodes its answer where one is wanted.
func call(ctx context.Context, cfg *rest.Config, verb, path string, body []byte, answer any) error {
	c := rest.CopyConfig(cfg)
	c.NegotiatedSerializer, c.GroupVersion = clientscheme.Codecs.WithoutConversion(), &schema.GroupVersion{}
	c.Timeout = requestTimeout + 5*time.Second
	client, err := rest.UnversionedRESTClientFor(c)
	if err != nil {
		return err
	}
	r := client.Verb(verb).RequestURI(path)
	if body != nil {
		r = r.Body(body).SetHeader("Content-Type", "application/json")
	}
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil || answer == nil {
		return err
	}
	data, err := result.Raw()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, answer); err != nil {
		return fmt.Errorf("%s answers something else at %s: %w", cfg.Host, path, err)
	}
	return nil
}

// Ask returns the members that the server of cfg knows, and what each reports about itself.
func Ask(ctx context.Context, cfg *rest.Config) ([]Member, error) {
	var list []Member
	if err := call(ctx, cfg, http.MethodGet, Path, nil, &list); err != nil {
		return nil, err
	}
	AskEach(ctx, cfg, list)
	return list, nil
}

// AskEach fills in what each member reports about itself to the user of cfg.
func AskEach(ctx context.Context, cfg *rest.Config, list []Member) {
	ctx, cancel := context.WithTimeout(ctx, selfTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for i := range list {
		m := &list[i]
		if m.Status != nil || m.Server == "" {
			continue
		}
		wg.Go(func() {
			c := rest.CopyConfig(cfg)
			c.Host = m.Server
			var s Status
			if err := call(ctx, c, http.MethodGet, SelfPath, nil, &s); err == nil {
				m.Status = &s
			}
		})
	}
	wg.Wait()
	SetLags(list)
}

// Remove removes the server of a name.
func Remove(ctx context.Context, cfg *rest.Config, name string, force bool) error {
	path := Path + "/" + name
	if force {
		path += "?force=true"
	}
	return call(ctx, cfg, http.MethodDelete, path, nil, nil)
}

// CreateToken makes the token of a server, and returns its text form.
func CreateToken(ctx context.Context, cfg *rest.Config, want Token) (string, error) {
	body, err := json.Marshal(want)
	if err != nil {
		return "", err
	}
	var text string
	err = call(ctx, cfg, http.MethodPost, TokenPath, body, &text)
	return text, err
}

// Tokens returns the tokens of servers.
func Tokens(ctx context.Context, cfg *rest.Config) (out []Token, err error) {
	err = call(ctx, cfg, http.MethodGet, TokenPath, nil, &out)
	return out, err
}

// RevokeToken revokes the token of a server.
func RevokeToken(ctx context.Context, cfg *rest.Config, id string) error {
	return call(ctx, cfg, http.MethodDelete, TokenPath+"/"+id, nil, nil)
}

// IsOnly reports whether err is that of a server that is not one of several with embedded etcds, or
// has none of this, or of a user who is not an administrator.
func IsOnly(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsForbidden(err)
}
