package web

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"

	"github.com/fairlead/fairlead/internal/gateway/basic"
)

// users are alice and bob with their names as passwords.
func (r *rig) staff(cost int) *basic.Users {
	r.Helper()
	text := ""
	for _, name := range []string{"alice", "bob"} {
		hash, err := bcrypt.GenerateFromPassword([]byte(name), cost)
		r.Must(err)
		text += fmt.Sprintf("%s:%s\n", name, hash)
	}
	u, problem := basic.ReadFile([]byte(text))
	if problem != "" {
		r.Fatal(problem)
	}
	return u
}

// Clients give a name and a password, and get 401 with the realm without the right ones. Without the Secret no request passes. A right
// password is known until it changes, and one client cannot have many verified.
func TestBasicAuth(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.users = r.staff(bcrypt.MinCost)
	auth := &decider{}
	r.auth = r.Web(auth.ServeHTTP)
	const on = "auth-type: basic; auth-secret: staff"
	ingresses := map[string]string{
		"a": on, "b": on + "; auth-realm: Staff only; auth-url: http://auth:8080/", "c": "permanent-redirect: /x; " + on,
	}
	r.ingress(ingresses, r.Web(identified))
	as := func(user string) string {
		return "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user))
	}
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		for _, c := range []struct {
			path   string
			fields []string
			want   string
		}{
			{"/a", nil, `401 Basic realm="Authentication Required"`},
			{"/a", []string{as("alice:alice")}, "200 "},
			{"/a/x", []string{as("bob:bob")}, "200 "},
			{"/a", []string{as("alice:bob")}, `401 Basic realm="Authentication Required"`},
			{"/a", []string{as("carol:carol")}, `401 Basic realm="Authentication Required"`},
			{"/a", []string{as(":")}, `401 Basic realm="Authentication Required"`},
			{"/a", []string{as("alice:alice"), as("x:y")}, `401 Basic realm="Authentication Required"`},
			{"/a", []string{"Authorization: Bearer x"}, `401 Basic realm="Authentication Required"`},
			{"/a/../a/%2e/", []string{as("alice:wrong")}, `401 Basic realm="Authentication Required"`},
			{"/b", nil, `401 Basic realm="Staff only"`},
			{"/b", []string{as("alice:alice")}, "401 Bearer"}, // both are asked for
			{"/c", nil, "301 "},
		} {
			answer, _ := r.sends(client, "GET", c.path, nil, c.fields...)
			if got := fmt.Sprint(answer.StatusCode, " ", answer.Header.Get("Www-Authenticate")); got != c.want {
				t.Errorf("HTTP/%d, %s %v: %q, want %q", version, c.path, c.fields, got, c.want)
			}
		}
	}
	r.users = r.staff(bcrypt.MinCost + 1) // the same passwords by other hashes
	r.ingress(ingresses, r.Web(identified))
	client, limited := r.clientOf(1), 0
	for range 5000 { // more than the ten a second that are allowed, on any machine
		if answer, _ := r.sends(client, "GET", "/a", nil, as("alice:wrong")); answer.StatusCode == http.StatusTooManyRequests {
			limited++
			break
		}
	}
	if limited == 0 {
		t.Error("a client had 5,000 passwords verified")
	}
	r.users = nil
	r.ingress(ingresses, r.Web(identified))
	if answer, _ := r.sends(client, "GET", "/a", nil, as("alice:alice")); answer.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without the Secret: %d", answer.StatusCode)
	}
	if log := r.Logged.String(); strings.Contains(log, "alice") {
		t.Errorf("the log has a name: %s", log)
	}
}
