package apiserver_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// The client certificate for etcd is read again for every connection: the server goes
// on writing to an etcd that it has to connect to again after the certificate that it
// started with, and the next one, have ended.
func TestEtcdCertificatesEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	authority, err := pki.Open(dir, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	authority.Life = 4 * time.Second
	var files sync.Mutex // held while the certificates must not change
	renew := func() (end time.Time) {
		files.Lock()
		defer files.Unlock()
		for _, l := range etcdLeaves() {
			p, err := authority.Ensure(l)
			if err != nil {
				t.Error(err)
				return end
			}
			end = p.Leaf.NotAfter
		}
		return end
	}
	first := renew()
	var renewing sync.WaitGroup
	defer renewing.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	renewing.Go(func() { wait.UntilWithContext(ctx, func(context.Context) { renew() }, 100*time.Millisecond) })
	data, port := t.TempDir(), "0"
	start := func() *embed.Etcd {
		files.Lock()
		defer files.Unlock()
		return secureEtcd(t, dir, data, port)
	}
	store := start()
	defer func() { store.Close() }()
	address := store.Clients[0].Addr().String()
	_, port, _ = strings.Cut(address, ":")
	client := clientOver(t, address, dir)
	for end := first; end.Before(first.Add(2 * authority.Life)); {
		eventually(t, "the certificates end and are renewed", func() bool { return time.Now().After(end) })
		end = renew()
		store.Close()
		store = start()
		eventually(t, "a write", func() bool { return writes(t, client) })
	}
}

// The authority of etcd is read again as well: the server goes on when etcd's certificates
// and its own are of another one.
func TestEtcdAuthorityIsReplaced(t *testing.T) {
	t.Parallel()
	dir, data := t.TempDir(), t.TempDir()
	issue := func() {
		next := t.TempDir()
		authority, err := pki.Open(next, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range etcdLeaves() {
			if _, err := authority.Ensure(l); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"ca.crt", "etcd.crt", "etcd.key", "client.crt", "client.key"} {
			if err := os.Rename(filepath.Join(next, name), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	issue()
	store := secureEtcd(t, dir, data, "0")
	defer func() { store.Close() }()
	address := store.Clients[0].Addr().String()
	client := clientOver(t, address, dir)
	if !writes(t, client) {
		t.Fatal("no write at first")
	}
	store.Close()
	issue()
	_, port, _ := strings.Cut(address, ":")
	store = secureEtcd(t, dir, data, port)
	eventually(t, "a write under the new authority", func() bool { return writes(t, client) })
}

// etcdLeaves are the certificates of an etcd on loopback and of its client.
func etcdLeaves() []pki.Leaf {
	return []pki.Leaf{
		{Name: "etcd", CommonName: "etcd", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}}, {Name: "client", CommonName: "fairlead"},
	}
}

// secureEtcd runs an etcd with the certificates in dir and its files in data.
func secureEtcd(t *testing.T, dir, data, port string) *embed.Etcd {
	t.Helper()
	e := etcd.Launch(t, func(c *embed.Config) {
		c.Dir = data
		c.ListenClientUrls = []url.URL{{Scheme: "https", Host: "127.0.0.1:" + port}}
		c.ClientTLSInfo = transport.TLSInfo{
			CertFile: filepath.Join(dir, "etcd.crt"), KeyFile: filepath.Join(dir, "etcd.key"), TrustedCAFile: filepath.Join(dir, "ca.crt"),
			ClientCertAuth: true,
		}
	})
	etcd.AwaitReady(t, e)
	// etcd reads its certificate once more after it is ready, and does not serve if that
	// does not match its key.
	config, err := transport.TLSInfo{
		CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key"), TrustedCAFile: filepath.Join(dir, "ca.crt"),
	}.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.NextProtos = []string{"h2"}
	dialer := tls.Dialer{Config: config, NetDialer: &net.Dialer{Timeout: time.Second}}
	eventually(t, "etcd answers", func() bool {
		conn, err := dialer.DialContext(t.Context(), "tcp", e.Clients[0].Addr().String())
		return err == nil && conn.Close() == nil
	})
	return e
}

// clientOver starts a server on the etcd at address, with the certificates in dir, and
// returns its client.
func clientOver(t *testing.T, address, dir string) kubernetes.Interface {
	t.Helper()
	return kubernetes.NewForConfigOrDie(apiservertest.Start(t, func(o *apiserver.Options) {
		o.Etcd = store.External{Servers: []string{"https://" + address}, CAFile: filepath.Join(dir, "ca.crt"),
			CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key")}
	}))
}

// writes reports whether an object can be created within a second.
func writes(t *testing.T, c kubernetes.Interface) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := c.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "after-"}},
		metav1.CreateOptions{})
	return err == nil
}
