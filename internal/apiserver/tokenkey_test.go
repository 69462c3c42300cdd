package apiserver_test

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/keyutil"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// The key of tokens is changed as docs/security.md describes it: while pki/sa.pub has both keys, servers with either key accept
// the tokens of both, and afterwards the tokens of the old one are rejected.
func TestKeyOfTokensIsChanged(t *testing.T) {
	t.Parallel()
	dir, spare := t.TempDir(), t.TempDir()
	key, pub := filepath.Join(dir, "pki", "sa.key"), filepath.Join(dir, "pki", "sa.pub")
	public := func(file string) []byte {
		t.Helper()
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		private, err := keyutil.ParsePrivateKeyPEM(text)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.MarshalPKIXPublicKey(private.(crypto.Signer).Public())
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	}
	// on makes a token on a server with the keys of this moment, and returns it. accepted and rejected are earlier ones.
	on := func(what string, accepted, rejected []string) string {
		t.Helper()
		s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
		defer stop()
		accounts := kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CoreV1().ServiceAccounts("default")
		_, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		made, err := accounts.CreateToken(t.Context(), "robot", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, token := range append(accepted, made.Status.Token) {
			if u, err := whoami(t, s, token); err != nil || u.Username != "system:serviceaccount:default:robot" {
				t.Errorf("%s: a token is answered with %v, %v", what, u, err)
			}
		}
		for _, token := range rejected {
			if _, err := whoami(t, s, token); !apierrors.IsUnauthorized(err) {
				t.Errorf("%s: a token of the old key is answered with %v", what, err)
			}
		}
		return made.Status.Token
	}
	put := func(from, to string) {
		t.Helper()
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first := on("with the old key", nil, nil)
	before, after := filepath.Join(spare, "old"), filepath.Join(spare, "new")
	put(key, before)
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	second := on("with a new key, which its start has made", nil, []string{first})
	put(key, after)
	if err := os.WriteFile(pub, slices.Concat(public(before), public(after)), 0o600); err != nil {
		t.Fatal(err)
	}
	on("with the new key and both public ones", []string{first, second}, nil)
	put(before, key)
	on("with the old key and both public ones", []string{first, second}, nil)
	put(after, key)
	if err := os.Remove(pub); err != nil {
		t.Fatal(err)
	}
	on("with only the new key", []string{second}, []string{first})
}
