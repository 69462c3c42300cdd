package cli

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A token is created, listed without its secret, used and revoked.
func TestToken(t *testing.T) {
	s := apiservertest.StartServer(t)
	fairlead := func(args ...string) (string, int) {
		var out, err bytes.Buffer
		code := run(context.Background(), append(append([]string{"token"}, args...), "--kubeconfig", s.Kubeconfig()),
			base.Streams{Out: &out, Err: &err})
		return out.String() + err.String(), code
	}
	text, code := fairlead("create", "--ttl", "1h", "--description", "rack-7")
	token, err := join.Parse(text)
	if code != 0 || err != nil {
		t.Fatalf("exit code %d, %v: %s", code, err, text)
	}
	status := func() int {
		cfg, err := join.Config(t.Context(), s.URL(), text)
		if err != nil {
			t.Fatal(err)
		}
		client, err := rest.HTTPClientFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer client.CloseIdleConnections()
		resp, err := client.Get(s.URL() + "/version")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := status(); got != http.StatusOK {
		t.Errorf("the new token is answered with %d", got)
	}
	list, _ := fairlead("list")
	if !strings.Contains(list, token.ID) || !strings.Contains(list, "rack-7") || strings.Contains(list, token.Secret) {
		t.Errorf("the list is\n%s", list)
	}
	if out, code := fairlead("revoke", token.ID); code != 0 {
		t.Errorf("exit code %d: %s", code, out)
	}
	testbed.Until(t, "the revoked token to be rejected", func() error { // tokens are cached for 2 s
		if got := status(); got != http.StatusUnauthorized {
			return fmt.Errorf("it is answered with %d", got)
		}
		return nil
	})
	if list, _ := fairlead("list"); strings.Contains(list, token.ID) {
		t.Errorf("a revoked token is listed:\n%s", list)
	}
	if out, code := fairlead("revoke", "nosuch"); code != exitFailed || !strings.Contains(out, "no token nosuch") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if out, code := fairlead("create", "--server", "--needs-approval"); code != exitUsage {
		t.Errorf("exit code %d: %s", code, out)
	}
	text, code = fairlead("create", "--needs-approval")
	if asks, err := join.Parse(text); code != 0 || err != nil || !asks.Approval {
		t.Errorf("exit code %d, %v: %s", code, err, text)
	}
	if list, _ := fairlead("list"); !strings.Contains(list, "nodes, by approval") {
		t.Errorf("the list is\n%s", list)
	}
	if out, code := fairlead("create", "--ttl", "-1h"); code != exitUsage {
		t.Errorf("exit code %d: %s", code, out)
	}
}
