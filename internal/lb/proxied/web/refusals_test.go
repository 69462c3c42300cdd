package web

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"
)

// A page of another origin that may use a rule can read why its request was refused; other pages cannot, and what an authorization
// server says about that does not count.
func TestRefusalsForBrowsers(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.users = r.staff(bcrypt.MinCost)
	r.auth = r.Web(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "*")
		w.WriteHeader(http.StatusUnauthorized)
	})
	const cors = "enable-cors: true; cors-allow-origin: https://a.example; cors-expose-headers: X-Why; "
	r.ingress(map[string]string{
		"basic": cors + "auth-type: basic; auth-secret: staff", "asked": cors + "auth-url: http://auth:8080/",
		"body": cors + "proxy-body-size: 4", "deny": cors + "denylist-source-range: 127.0.0.0/8",
		"limit": cors + "limit-rpm: 1; limit-burst-multiplier: 1", "away": cors + "backend-protocol: HTTPS",
		"plain": "proxy-body-size: 4",
	}, r.Web(identified))
	for _, version := range []int{1, 2} {
		for path, status := range map[string]int{
			"/basic": 401, "/asked": 401, "/body": 413, "/body?longer": 413, "/deny": 403, "/limit": 0, "/away": 502, "/plain": 413,
		} {
			for origin, allowed := range map[string]bool{"https://a.example": true, "https://b.example": false} {
				body := io.Reader(strings.NewReader("longer"))
				if strings.Contains(path, "?") {
					body = struct{ io.Reader }{body} // its length is not announced
				}
				answer, _ := r.sends(r.clientOf(version), "POST", path, body, "Origin: "+origin)
				got := fmt.Sprint(answer.Header["Access-Control-Allow-Origin"], answer.Header["Access-Control-Expose-Headers"])
				want := "[] []"
				if allowed && path != "/plain" {
					want = "[https://a.example] [X-Why]"
				}
				if got != want || answer.StatusCode != status && status != 0 {
					t.Errorf("HTTP/%d, %s, %s: %d %s, want %d %s", version, path, origin, answer.StatusCode, got, status, want)
				}
			}
		}
		q := []string{"Origin: https://a.example", "Access-Control-Request-Method: PUT"}
		if answer, _ := r.sends(r.clientOf(version), "OPTIONS", "/basic", nil, q...); answer.StatusCode != 200 ||
			len(answer.Header["Access-Control-Allow-Origin"]) != 1 || answer.Header.Get("Access-Control-Allow-Methods") == "" {
			t.Errorf("HTTP/%d, a question: %d %v", version, answer.StatusCode, answer.Header)
		}
	}
}

// With "satisfy: any" one of address, password and server is enough, and without any of them no request passes.
func TestSatisfyAny(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.users = r.staff(bcrypt.MinCost)
	auth := &decider{}
	r.auth = r.Web(auth.ServeHTTP)
	const server, password = "auth-url: http://auth:8080/; ", "auth-type: basic; auth-secret: staff; "
	const here, there = "whitelist-source-range: 127.0.0.0/8; ", "whitelist-source-range: 192.0.2.0/24; "
	const denied, other = "denylist-source-range: 127.0.0.0/8; ", "denylist-source-range: 192.0.2.0/24; "
	r.ingress(map[string]string{
		"here": here + server + password + "satisfy: any", "there": there + server + password + "satisfy: any",
		"denied": here + denied + password + "satisfy: any", "other": other + password + "satisfy: any",
		"away": there + "satisfy: any", "free": other + "satisfy: any", "all": here + password + "satisfy: all", "both": password + server,
	}, r.Web(func(http.ResponseWriter, *http.Request) {}))
	user := "Basic " + base64.StdEncoding.EncodeToString([]byte("alice:alice"))
	wrong := "Basic " + base64.StdEncoding.EncodeToString([]byte("alice:bob"))
	for _, c := range []struct {
		path, authorization string
		status              int
	}{
		{"/here", "", 200}, {"/here", wrong, 200},
		{"/there", "", 401}, {"/there", wrong, 401}, {"/there", user, 200}, {"/there", "bob", 200}, {"/there", "403", 401},
		{"/there", "500", 500}, {"/denied", "", 401}, {"/denied", user, 200}, {"/other", "", 401}, {"/other", user, 200},
		{"/away", "", 403}, {"/free", "", 200}, {"/all", "", 401}, {"/all", user, 200}, {"/both", user, 401}, {"/both", "bob", 401},
	} {
		answer, _ := r.sends(r.clientOf(1), "GET", c.path, nil, "Authorization: "+c.authorization)
		challenge := answer.Header.Get("Www-Authenticate")
		if answer.StatusCode != c.status || c.status == 401 && c.path != "/both" && !strings.HasPrefix(challenge, "Basic ") {
			t.Errorf("%s %.5q: %d %q, want %d", c.path, c.authorization, answer.StatusCode, challenge, c.status)
		}
	}
	r.ingress(map[string]string{"there": there + server + password + "satisfy: any"}, r.Web(identified))
	r.auth = netip.AddrPort{}
	r.endpoints("auth")
	if answer, _ := r.sends(r.clientOf(1), "GET", "/there", nil); answer.StatusCode == http.StatusOK {
		t.Errorf("without the server: %d", answer.StatusCode)
	}
}

// What the load balancer tells a Pod about a request, no trailer of the client tells otherwise.
func TestMarksOfTrailers(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-id": "x-request-id,traceparent"})
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body)
		_, _ = fmt.Fprint(w, len(q.Header["X-Request-Id"]), len(q.Header["Traceparent"]), q.Trailer)
	}))
	for _, version := range []int{1, 2} {
		q := httptest.NewRequest(http.MethodPost, "http://"+r.At.String()+"/", struct{ io.Reader }{strings.NewReader("body")})
		q.RequestURI = ""
		q.Trailer = http.Header{"X-Request-Id": {"forged"}, "X_request-Id": {"forged"}, "Traceparent": {"forged"}, "X-Sum": {"1"}}
		answer, err := r.clientOf(version).Do(q)
		r.Must(err)
		text, err := io.ReadAll(answer.Body)
		r.Must(err)
		if got := string(text); !strings.HasPrefix(got, "1 1 ") || !strings.Contains(got, "X-Sum:[1]") || strings.Contains(got, "forged") {
			t.Errorf("HTTP/%d: %s", version, got)
		}
	}
}
