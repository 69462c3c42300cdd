// Package etcd runs etcds for tests, in the test's own process, as stores that an administrator
// has beside the servers.
package etcd

import (
	"net/url"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Start runs an etcd until the test ends. See Launch.
func Start(t testing.TB, change ...func(*embed.Config)) *embed.Etcd {
	t.Helper()
	e := Launch(t, change...)
	t.Cleanup(e.Close)
	AwaitReady(t, e)
	return e
}

// URL is where clients reach an etcd.
func URL(e *embed.Etcd) string {
	if u := e.Config().AdvertiseClientUrls[0]; u.Scheme == "unix" {
		return u.String()
	}
	return "http://" + e.Clients[0].Addr().String()
}

// Launch begins to run an etcd, which the caller closes, once. It has no peers, a free port of loopback
// for its clients, and a temporary directory, and syncs nothing, unless change says otherwise.
func Launch(t testing.TB, change ...func(*embed.Config)) *embed.Etcd {
	t.Helper()
	c := embed.NewConfig()
	c.Name, c.Dir = "external", t.TempDir()
	c.ListenClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	c.ListenPeerUrls = nil
	c.TickMs, c.ElectionMs = 20, 200
	c.UnsafeNoFsync = true
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	for _, f := range change {
		f(c)
	}
	c.AdvertiseClientUrls = c.ListenClientUrls
	if c.ListenPeerUrls == nil {
		c.InitialCluster = c.InitialClusterFromName(c.Name)
	} else {
		c.AdvertisePeerUrls = c.ListenPeerUrls
	}
	e, err := embed.StartEtcd(c)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// AwaitReady waits until an etcd has a leader.
func AwaitReady(t testing.TB, e *embed.Etcd) {
	t.Helper()
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(testbed.Patience):
		t.Fatalf("etcd is not ready after %s", testbed.Patience)
	}
}
