package apiserver_test

import (
	"context"
	"net"
	"net/url"
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
)

// The client certificate for etcd is read again for every connection: the server goes
// on writing to an etcd that it has to connect to again after the certificate that it
// started with, and the next one, have ended.
func TestEtcdCertificatesEnd(t *testing.T) {
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
		for _, l := range []pki.Leaf{
			{Name: "etcd", CommonName: "etcd", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}}, {Name: "client", CommonName: "fairlead"},
		} {
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
	file := func(name string) string { return filepath.Join(dir, name) }
	data, port := t.TempDir(), "0"
	start := func() *embed.Etcd {
		files.Lock()
		defer files.Unlock()
		return runEtcd(t, data, func(c *embed.Config) {
			c.ListenClientUrls = []url.URL{{Scheme: "https", Host: "127.0.0.1:" + port}}
			c.AdvertiseClientUrls = c.ListenClientUrls
			c.ClientTLSInfo = transport.TLSInfo{
				CertFile: file("etcd.crt"), KeyFile: file("etcd.key"), TrustedCAFile: file("ca.crt"), ClientCertAuth: true,
			}
		})
	}
	etcd := start()
	defer func() { etcd.Close() }()
	address := etcd.Clients[0].Addr().String()
	_, port, _ = strings.Cut(address, ":")
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.Etcd = apiserver.ExternalEtcd{
			Servers: []string{"https://" + address}, CAFile: file("ca.crt"), CertFile: file("client.crt"), KeyFile: file("client.key"),
		}
	})
	client := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	for end := first; end.Before(first.Add(3 * authority.Life)); {
		eventually(t, "the certificates end and are renewed", func() bool { return time.Now().After(end) })
		end = renew()
		etcd.Close()
		etcd = start()
		eventually(t, "a write", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := client.CoreV1().ConfigMaps("default").Create(ctx,
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "after-"}}, metav1.CreateOptions{})
			return err == nil
		})
	}
}
