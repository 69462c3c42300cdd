package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	several "github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// rejected tries to join as what may not, and with what may not.
func rejected(t *testing.T, n *testbed.Network, first *member) {
	t.Helper()
	good := read(t, first.token(t))
	parts := strings.Split(good, ".")
	parts[1] = strings.Repeat("0", len(parts[1]))
	expired := read(t, first.token(t, "--ttl", "8s"))
	testbed.Until(t, "a token to expire", func() error {
		if list := first.must(t, "token", "list"); !strings.Contains(list, "expired") {
			return errors.New(list)
		}
		return nil
	})
	revoked := read(t, first.token(t))
	first.must(t, "token", "revoke", strings.Split(revoked, ".")[2])
	for what, x := range map[string]struct {
		token, want string
		flags       []string
	}{
		"the token of a node":          {first.must(t, "token", "create"), "this is the token of a node", nil},
		"the token of another cluster": {strings.Join(parts, "."), "the server is not of the token's cluster", nil},
		"an expired token":             {expired, "the token is not valid", nil},
		"a revoked token":              {revoked, "the token is not valid", nil},
		"a token of another form":      {strings.Replace(good, parts[2], "zzzzzz", 1), "the token is not valid", nil},
		"other ranges": {good, `--service-cluster-ip-range is "10.97.0.0/16" here and "10.96.0.0/16,fd00:10:96::/112" there`,
			[]string{"--service-cluster-ip-range", "10.97.0.0/16"}},
	} {
		dir := filepath.Join(t.TempDir(), "data")
		if out := join(t, n.Host("server4"), dir, first.url(), x.token, x.flags...); !strings.Contains(out, x.want) {
			t.Errorf("%s: %s, want %q", what, out, x.want)
		}
		if _, err := os.Stat(filepath.Join(dir, "pki", "ca.key")); err == nil {
			t.Errorf("%s: got the key of the authority", what)
		}
	}
	dir := filepath.Join(t.TempDir(), "data")
	out := join(t, n.Host("server4"), dir, first.url(), good, "--server-name", "other")
	if !strings.Contains(out, "used by the server intruder") {
		t.Errorf("a token that another has used: %s", out)
	}
	own := filepath.Join(t.TempDir(), "data")
	newMember(t, n, "server4").at(own).start(t).Stop()
	if out = join(t, n.Host("server4"), own, first.url(), good); !strings.Contains(out, "has the objects of another server") {
		t.Errorf("a server of another cluster: %s", out)
	}
}

// join has a server join that must be rejected, and returns what it says.
func join(t *testing.T, on *testbed.Host, dir, url, token string, flags ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	cmd := on.Command(ctx, process.Program("fairlead"), append([]string{
		"server", "--data-dir", dir, "--bind-address", "127.0.0.1," + on.Addr4().String(), "--server-name", "intruder",
		"--join", url, "--token", strings.TrimSpace(token),
	}, flags...)...)
	cmd.Env = append(os.Environ(), "HOME="+dir)
	out, err := cmd.CombinedOutput()
	if err == nil || ctx.Err() != nil {
		t.Errorf("the server was not rejected: %v", err)
	}
	return string(out)
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// attacked tries what a stolen certificate and rights to paths are worth.
func attacked(t *testing.T, first *member) {
	t.Helper()
	dir, err := pki.Open(filepath.Join(first.dir, "pki"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	key, keyPEM, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	peer, err := tls.LoadX509KeyPair(filepath.Join(first.dir, "pki", "etcd-peer.crt"), filepath.Join(first.dir, "pki", "etcd-peer.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := askPeer(t, first, peer); err != nil {
		t.Errorf("the certificate of a peer is rejected by the port of peers: %v", err)
	}
	for _, u := range []pki.User{
		{Name: "system:node:node1", Groups: []string{"system:nodes"}}, {Name: "fairlead-server"}, {Name: several.PeerName},
	} {
		certPEM, err := dir.SignClient(key.Public(), u, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		pair, err := tls.X509KeyPair(certPEM, keyPEM)
		if err != nil {
			t.Fatal(err)
		}
		if err := askPeer(t, first, pair); err == nil {
			t.Errorf("%s talks to the port of peers", u.Name)
		}
		cfg := rest.CopyConfig(first.Config)
		cfg.TLSClientConfig = rest.TLSClientConfig{CAData: dir.AuthoritiesPEM(), CertData: certPEM, KeyData: keyPEM}
		client, err := rest.HTTPClientFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for path, want := range map[string]int{several.JoinPath + "bundle": 401, several.Path: 403, several.TokenPath: 403} {
			r, err := client.Post(cfg.Host+path, "application/json", strings.NewReader(`{"name":"intruder"}`))
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(r.Body)
			r.Body.Close()
			if r.StatusCode != want {
				t.Errorf("%s gets %d at %s, want %d: %s", u.Name, r.StatusCode, path, want, body)
			}
		}
	}
	slowly(t, first)
	onlyPaths(t, first)
}

// slowly asks to join with tokens that were never made, and withholds the bodies: each request is answered at once, and none
// keeps another server from joining.
func slowly(t *testing.T, first *member) {
	t.Helper()
	forged := strings.Split(read(t, first.token(t)), ".")
	forged[3] = strings.Repeat("a", len(forged[3]))
	client, err := rest.HTTPClientFor(first.Config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // half of how long a body may take
	defer cancel()
	for range 10 {
		body, withheld := io.Pipe()
		defer withheld.Close()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, first.url()+several.JoinPath+"bundle", body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+strings.Join(forged, "."))
		resp, err := client.Do(r)
		if err != nil {
			t.Fatalf("a request with a token that was never made waits for its body: %v", err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("a request with a token that was never made: %s", resp.Status)
		}
	}
}

// askPeer asks for the members at the port of peers.
func askPeer(t *testing.T, m *member, pair tls.Certificate) error {
	t.Helper()
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			m.host.Do(func() { c, err = (&net.Dialer{}).DialContext(ctx, network, address) })
			return c, err
		},
	}}
	r, err := client.Get("https://" + m.host.Addr4().String() + ":2380/members")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", r.Status)
	}
	return nil
}

// onlyPaths tries to make the token of a server with the right to all paths and to Secrets.
func onlyPaths(t *testing.T, first *member) {
	t.Helper()
	roles := first.Client.RbacV1()
	rules := []rbacv1.PolicyRule{
		{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}}, {Verbs: []string{"*"}, APIGroups: []string{""}, Resources: []string{"secrets"}},
	}
	_, err := roles.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "paths"}, Rules: rules},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = roles.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "paths"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "paths"},
		Subjects: []rbacv1.Subject{{Kind: "User", Name: "eve", APIGroup: rbacv1.GroupName}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := rest.CopyConfig(first.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "eve"}
	testbed.Until(t, "the role to count", func() error {
		_, err := several.CreateToken(t.Context(), cfg, several.Token{End: time.Now().Add(time.Hour)})
		if !apierrors.IsForbidden(err) {
			t.Fatalf("rights to paths make the token of a server: %v", err)
		}
		if !strings.Contains(err.Error(), "is not an administrator of the cluster") {
			return err // RBAC does not know the role yet
		}
		return nil
	})
}
