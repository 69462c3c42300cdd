package client

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/svc"
)

// asked is a server that signs with a key since a time. list and leases are what it answers about the others.
type asked struct {
	key    string
	since  time.Time
	list   []members.Member
	leases []coordinationv1.Lease
}

func (a *asked) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var answer any
	switch {
	case r.URL.Path == accounts.KeysPath:
		w.Header().Set("Last-Modified", a.since.UTC().Format(http.TimeFormat))
		answer = map[string]any{"keys": []map[string]string{{"kid": a.key}, {"kid": "other"}}}
	case r.URL.Path == members.Path && a.list != nil:
		answer = a.list
	case r.URL.Path == members.Path:
		w.WriteHeader(http.StatusConflict)
		answer = members.Conflict("no members").(*apierrors.StatusError).Status()
	case r.URL.Path == members.SelfPath:
		answer = members.Status{}
	case strings.HasSuffix(r.URL.Path, "/leases"):
		answer = coordinationv1.LeaseList{
			TypeMeta: metav1.TypeMeta{Kind: "LeaseList", APIVersion: "coordination.k8s.io/v1"}, Items: a.leases,
		}
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// start returns the URL of a server, and how to ask it.
func (a *asked) start(t *testing.T) (string, *rest.Config) {
	t.Helper()
	s := httptest.NewTLSServer(a)
	t.Cleanup(s.Close)
	return s.URL, &rest.Config{
		Host: s.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	}
}

// A server that does not run has to know a key too; a learner has not.
func TestKeysOfServersThatDoNotRun(t *testing.T) {
	t.Parallel()
	lease := func(url string, renewed time.Time) coordinationv1.Lease {
		at := strings.TrimPrefix(url, "https://")
		return coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{
				Name: svc.ServerLeasePrefix + at, Namespace: "kube-system", Annotations: map[string]string{svc.EndpointAnnotation: at},
			},
			Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: renewed}},
		}
	}
	const down = "https://127.0.0.1:1"
	embedded, external, single := &asked{key: "a"}, &asked{key: "a"}, &asked{key: "a"}
	url, byMembers := embedded.start(t)
	embedded.list = []members.Member{
		{Name: "one", Server: url, Role: members.RoleLeader}, {Name: "two", Server: down, Role: members.RoleVoter},
		{Name: "three", Role: members.RoleVoter}, {Name: "four", Server: down, Role: members.RoleLearner},
	}
	url, byLeases := external.start(t)
	external.leases = []coordinationv1.Lease{lease(url, time.Now()), lease(down, time.Now().Add(-time.Hour))}
	_, byAddress := single.start(t)
	for name, c := range map[string]struct {
		cfg   *rest.Config
		wrong []string
	}{
		"members": {byMembers, []string{"", "two: it does not run", "three: it does not run"}},
		"Leases":  {byLeases, []string{"", "127.0.0.1:1: it does not run since"}},
		"single":  {byAddress, []string{""}},
	} {
		servers, err := keysOfServers(t.Context(), c.cfg)
		if err != nil || len(servers) != len(c.wrong) {
			t.Fatalf("%s: %+v, %v", name, servers, err)
		}
		for i, s := range servers {
			switch want := c.wrong[i]; {
			case want == "" && (s.err != nil || !s.has("a", true) || !s.has("other", false) || s.has("other", true)):
				t.Errorf("%s: %+v", name, s)
			case want != "" && (s.err == nil || !strings.HasPrefix(s.at+": "+s.err.Error(), want)):
				t.Errorf("%s: %+v, want %q", name, s, want)
			}
		}
	}
}

// An abort is refused while another server may sign with the next key: its tokens would be rejected.
func TestAbortAsksOtherServers(t *testing.T) {
	t.Parallel()
	first, silent := serverKeys{at: "one", ids: []string{"old", "next"}}, serverKeys{at: "two", err: errors.New("refused")}
	for want, servers := range map[string][]serverKeys{
		"": {first, {at: "two", ids: []string{"old"}}},
		"these servers sign with key next already: two": {first, {at: "two", ids: []string{"next", "old"}}},
		"cannot be asked: two (refused)":                {first, silent},
	} {
		err := signsNowhere(servers, "next")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	asks := &asked{key: "next"}
	_, cfg := asks.start(t)
	servers, err := keysOfServers(t.Context(), cfg)
	if err != nil || signsNowhere(servers, "next") == nil || signsNowhere(servers, "other") != nil {
		t.Errorf("%+v, %v", servers, err)
	}
}

// The tokens of the old key end an hour after the last server has begun to sign with the new one, not this one.
func TestFinishWaitsForTheLastServer(t *testing.T) {
	t.Parallel()
	now := time.Now().Truncate(time.Second)
	here, late := now.Add(-3*time.Hour), &asked{key: "new", since: now.Add(-30 * time.Minute)}
	_, cfg := late.start(t)
	servers, err := keysOfServers(t.Context(), cfg)
	if err != nil || len(servers) != 1 || !servers[0].since.Equal(late.since) {
		t.Fatalf("%+v, %v", servers, err)
	}
	if err := old(here, servers, now); err == nil || !strings.Contains(err.Error(), servers[0].at) || !strings.Contains(err.Error(), "40m") {
		t.Errorf("half an hour after another server: %v", err)
	}
	if err := old(here, servers, late.since.Add(accounts.TokenLife)); err != nil {
		t.Errorf("later: %v", err)
	}
	if err := old(now, nil, now); err == nil || !strings.Contains(err.Error(), "this server") {
		t.Errorf("at once after this server: %v", err)
	}
}
