package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/svc"
)

// endedServer is how old the report of a server is that does not run any more.
const endedServer = time.Minute

// serverKeys are the keys whose tokens a server accepts; the first one signs, since that time (zero if the server does not tell). err
// is why they are not known.
type serverKeys struct {
	at    string
	ids   []string
	since time.Time
	err   error
}

func (s *serverKeys) has(id string, signs bool) bool {
	for i, k := range s.ids {
		if k == id && (i == 0 || !signs) {
			return true
		}
	}
	return false
}

// keysOfServers asks all servers of the cluster for their keys. One that does not run has an error: it goes on with the keys that it
// had.
func keysOfServers(ctx context.Context, cfg *rest.Config) ([]serverKeys, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	out, err := serversByMembers(ctx, cfg)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) { // one server, or an etcd that is not fairlead's
		out, err = serversByLeases(ctx, cfg, time.Now())
	}
	if err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	for i := range out {
		if s := &out[i]; s.err == nil {
			wg.Go(func() { s.ids, s.since, s.err = keysAt(ctx, cfg, s.at) })
		}
	}
	wg.Wait()
	return out, nil
}

// serversByMembers returns the servers whose etcds are members of the cluster. A learner has got the files of the others just now.
func serversByMembers(ctx context.Context, cfg *rest.Config) ([]serverKeys, error) {
	list, err := members.Ask(ctx, cfg)
	if err != nil {
		return nil, err
	}
	var out []serverKeys
	for _, m := range list {
		switch {
		case m.Role == members.RoleLearner:
		case m.Server == "" || m.Status == nil:
			out = append(out, serverKeys{at: m.Name, err: errors.New("it does not run, or this machine cannot ask it")})
		default:
			out = append(out, serverKeys{at: strings.TrimPrefix(m.Server, "https://")})
		}
	}
	return out, nil
}

// serversByLeases returns the servers that have reported their addresses.
func serversByLeases(ctx context.Context, cfg *rest.Config, now time.Time) ([]serverKeys, error) {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	leases, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var out []serverKeys
	running := false
	for i := range leases.Items {
		l := &leases.Items[i]
		at, is := l.Annotations[svc.EndpointAnnotation]
		if !is || !strings.HasPrefix(l.Name, svc.ServerLeasePrefix) {
			continue
		}
		s := serverKeys{at: at}
		if l.Spec.RenewTime != nil && now.Sub(l.Spec.RenewTime.Time) > endedServer {
			s.err = fmt.Errorf("it does not run since %s; if it is gone for good: kubectl delete lease -n %s %s",
				l.Spec.RenewTime.Format(time.RFC3339), l.Namespace, l.Name)
		}
		running = running || s.err == nil
		out = append(out, s)
	}
	if !running { // one on a loopback address does not report that
		out = append(out, serverKeys{at: strings.TrimPrefix(cfg.Host, "https://")})
	}
	return out, nil
}

// maxKeys bounds the answer of a server with its keys, in bytes.
const maxKeys = 1 << 20

// keysAt returns the IDs of the keys of the server at an address, and since when the first one signs.
func keysAt(ctx context.Context, cfg *rest.Config, at string) (ids []string, since time.Time, err error) {
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, since, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+at+accounts.KeysPath, nil)
	if err != nil {
		return nil, since, err
	}
	answer, err := client.Do(r)
	if err != nil {
		return nil, since, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, since, fmt.Errorf("it answers %s at %s", answer.Status, accounts.KeysPath)
	}
	var set struct {
		Keys []struct {
			ID string `json:"kid"`
		} `json:"keys"`
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxKeys)).Decode(&set); err != nil {
		return nil, since, err
	}
	for _, k := range set.Keys {
		ids = append(ids, k.ID)
	}
	if text := answer.Header.Get("Last-Modified"); text != "" { // a server of an earlier version does not tell
		since, err = http.ParseTime(text)
	}
	return ids, since, err
}
