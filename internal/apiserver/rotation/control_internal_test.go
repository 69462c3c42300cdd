package rotation

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// directory returns a new one, and a bundle of its authority and the next.
func directory(t *testing.T, path string) (*pki.Directory, *pki.Bundle) {
	t.Helper()
	d, err := pki.Open(path, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	both, err := d.Successor()
	if err != nil {
		t.Fatal(err)
	}
	return d, both
}

func sealedAt(t *testing.T, step Step, both *pki.Bundle, kept int) *corev1.Secret {
	t.Helper()
	secret, err := (&state{step, *both}).seal(kept)
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// A step that another server's write has overtaken is decided again, and not taken for done.
func TestStepIsOvertaken(t *testing.T) {
	t.Parallel()
	d, both := directory(t, t.TempDir())
	client := fake.NewClientset(sealedAt(t, Trust, both, 0))
	raced := false
	client.PrependReactor("update", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
		if raced {
			return false, nil, nil
		}
		raced = true
		secrets := corev1.SchemeGroupVersion.WithResource("secrets")
		if err := client.Tracker().Update(secrets, sealedAt(t, Sign, both, 0), metav1.NamespaceSystem); err != nil {
			t.Error(err)
		}
		return true, nil, apierrors.NewConflict(secrets.GroupResource(), SecretName, nil)
	})
	r := &Rotation{o: Options{Client: client, PKI: d, Log: slog.New(slog.DiscardHandler)}}
	if err := r.Abort(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, s, err := r.current(t.Context())
	if err != nil || s.Step != Back {
		t.Errorf("after an --abort that met the step %s: %+v, %v", Sign, s, err)
	}
}

// A server that a rotation has left behind is told to copy pki/, one whose installer has provided another
// authority after the end is not.
func TestLeftBehind(t *testing.T) {
	t.Parallel()
	_, both := directory(t, t.TempDir())
	other, _ := directory(t, t.TempDir())
	path := t.TempDir()
	provide(t, path)
	provided, err := pki.Open(path, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what string
		dir  *pki.Directory
		step Step
		left bool
	}{
		{"another authority during a rotation", other, Sign, true},
		{"another authority after the end", other, Done, true},
		{"an installer's during a rotation", provided, Sign, true},
		{"an installer's after the end", provided, Done, false},
	} {
		r := &Rotation{o: Options{PKI: c.dir}}
		if err := r.left(sealedAt(t, c.step, both, 1)); (err != nil) != c.left {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// provide puts an authority into a directory as an installer does.
func provide(t *testing.T, dir string) {
	t.Helper()
	key, keyPEM, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "example"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), "ca.key": keyPEM,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
